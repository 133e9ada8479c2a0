#!/usr/bin/env bash
# On a machine with a GPU and no network: build, then measure. Results come as JSON lines in the folder given, each as it is
# measured; a part that stands there already is not measured again.
# usage: benchmarks/gpu.sh OUT COMMIT PART[@SECONDS]...
#   parts: kernels, pages, ... see below; figures=NAME,NAME,... (`benchmarks/figures.py`): one process, one compilation
set -uo pipefail
out=$1 commit=$2
shift 2
host=$((120000000000 * $(nvidia-smi -L | wc -l)))
sparse=pariskv:retrieved=100,pariskv-plus:retrieved=100,clusterkv-plus:budget=1024:hits=0.7,prkv:budget=1024:hits=0.7
export PYTHONUNBUFFERED=1
mkdir -p "$out"
python3 -m pip install --quiet --no-build-isolation --no-deps . || exit 1
run() { # SECONDS COMMAND...: fewer where the part's own are fewer
  local seconds=$(($1 < most ? $1 : most)); shift
  echo "== $*"
  timeout -k 5 "$seconds" "$@" 2>&1 | grep --line-buffered -avE 'AUTOTUNE|triton_mm_|SingleProcess|^strides|^dtypes|^  mm ' | stdbuf -oL cut -c1-400
}
measure() { run "$1" python3 -m benchmarks.measure "$out" "$commit" "$host" "${@:2}"; }
kernels() { run 150 python3 -m "benchmarks.$1" "${@:2}" --out "$out/$1.jsonl" --commit "$commit"; }
for part in "$@"; do
  begin=$SECONDS most=580 name=$part
  [[ $part == *@* ]] && most=${part##*@} name=${part%@*}
  case $name in
    kernels) for one in kernels_decode kernels_pariskv kernels_pages; do kernels $one; done ;;
    pages) for one in kernels_pages kernels_transfer; do kernels $one; done
      measure 200 indexing ;;
    nodes) kernels kernels_nodes ;;
    decode-kernels) kernels kernels_decode ;;
    figures=*) run 580 python3 -m benchmarks.figures "${name#figures=}" --out "$out/decode.jsonl" --host-bytes "$host" --commit "$commit" ;;
    icecache) # its ways to search, eager
      searches=icecache-digest,icecache-digest:query_beam=32,icecache-digest:transfer=bulk,icecache-digest:reuse=3
      searches+=,icecache,icecache:transfer=uva,icecache:preset=code
      run 300 python3 -m kvthaw bench decode --shape llama-3.1-8b --length 36864 --method "full,$searches" --steps eager \
        --host-memory "$host" --out "$out/decode.jsonl" --commit "$commit" ;;
    breakdown) for one in full ${sparse//,/ }; do # nothing is timed after a profile in the same process
        measure 100 breakdown "$one"
      done ;;
    prefill) # what one pass of full attention takes is known
      cp -n benchmarks/results/prefill.jsonl "$out/"
      measure 400 prefill ;;
    *) echo "no part $name"; exit 2 ;;
  esac
  echo "== $part took $((SECONDS - begin)) s"
done
