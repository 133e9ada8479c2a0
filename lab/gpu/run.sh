#!/usr/bin/env bash
# On a machine with a GPU and no network: run parts of this folder after each other, within a time, and pack what they write every 15 s.
# usage: lab/gpu/run.sh OUT COMMIT SECONDS PART[:MORE][@SECONDS][+PART[:MORE][@SECONDS]...]...
#   PART: PART.sh of this folder, called as PART.sh FOLDER COMMIT SECONDS [MORE] in the repository's root and killed after its
#   seconds. Parts joined by + run together: none that is timed may be among them. figures:overview@250 makes one figure.
#   MORE: arguments, with ~ for a space: beside:--parts~first,decode~--methods~thaw,full@250.
#   OUT/all.tgz has the folders, with what each printed in its log.
# .gpu/, if it is there, holds what git does not; prepare.sh makes it: packages.tar.xz (Python packages that the machine lacks) and a
# native module for its Python. Without one kvthaw is built and installed. What a part needs besides it says itself.
set -u
out=$1 commit=$2 total=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd) work=$(mktemp -d)
mkdir -p "$out" "$work/packages" "$work/results"
[ -e .gpu/packages.tar.xz ] && tar -C "$work/packages" -xJf .gpu/packages.tar.xz
if ls .gpu/_native.*.so > /dev/null 2>&1; then cp .gpu/_native.*.so src/kvthaw/native/
else python3 -m pip install --quiet --no-build-isolation --no-deps . || exit 1
fi
baselines=packages/kvthaw-baselines info=$work/packages/kvthaw_baselines-0.dist-info # what pip would write: how kvthaw finds them
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: kvthaw-baselines\nVersion: 0\n' > "$info/METADATA"
{ echo '[kvthaw.methods]'; sed -n 's/^\([a-z0-9-]*\) = "\(kvthaw_baselines\..*\)"/\1 = \2/p' $baselines/pyproject.toml; } > "$info/entry_points.txt"
export PYTHONPATH=$PWD/src:$PWD/$baselines/src:$PWD:$PWD/tests:$work/packages PYTHONUNBUFFERED=1
pack() { tar -C "$work/results" -czf "$work/all.tgz" . 2> /dev/null; mv "$work/all.tgz" "$out/all.tgz"; }
(while sleep 15; do pack; done) &
packer=$!
trap 'kill $packer; pack' EXIT
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$work/results/gpu.txt"
one() { # PART[:MORE][@SECONDS]
  local part=${1%@*} most=$((total - SECONDS - 5)) begin=$SECONDS rc
  local name=${part%%:*} more=()
  [[ $part == *:* ]] && IFS='~' read -ra more <<< "${part#*:}"
  if [[ $1 == *@* ]] && ((${1##*@} < most)); then most=${1##*@}; fi
  if ((most < 10)); then echo "== $name: no time left"; return; fi
  local folder=$work/results/$name count=1
  while [ -e "$folder" ]; do folder=$work/results/$name$((++count)); done # of a part that runs again
  mkdir -p "$folder"
  timeout -k 5 "$most" bash "$here/$name.sh" "$folder" "$commit" "$most" "${more[@]}" > "$folder/log" 2>&1
  rc=$?
  echo "== $name: exit status $rc after $((SECONDS - begin)) of $most s"
  tail -n 4 "$folder/log" | cut -c1-300
}
for group in "$@"; do
  running=()
  for part in ${group//+/ }; do
    one "$part" &
    running+=($!)
  done
  wait "${running[@]}"
done
