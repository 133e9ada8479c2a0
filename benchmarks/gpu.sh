#!/usr/bin/env bash
# On a machine with a GPU and no network: build, check, then measure. Results come as JSON lines in the folder given.
# usage: benchmarks/gpu.sh OUT COMMIT PART...   parts: check, kernels, icecache, captured
set -uo pipefail
out=$1 commit=$2
shift 2
export PYTHONUNBUFFERED=1
python3 -m pip install --quiet --no-build-isolation --no-deps . || exit 1
run() { local seconds=$1; shift; echo "== $*"; timeout "$seconds" "$@" 2>&1 | tail -"${LINES_SHOWN:-25}"; }
decode() { run "$1" python3 -m kvthaw.bench.decode out="$out/decode.jsonl" commit="$commit" "${@:2}" | cut -c1-1500; }
for part in "$@"; do
  begin=$SECONDS
  case $part in
    check) run 240 python3 -m pytest -q -x --no-header -m gpu tests/engine/test_decode.py tests/kernels -p no:warnings ;;
    checkall) run 300 python3 -m pytest -q --no-header -m gpu tests/engine/test_decode.py tests/kernels -p no:warnings ;;
    kernels) for bench in kernels_decode kernels_pariskv kernels_pages; do run 150 python3 -m "kvthaw.bench.$bench" --json --out "$out/$bench.jsonl" --commit "$commit"; done ;;
    decode-kernels) run 150 python3 -m kvthaw.bench.kernels_decode --json --out "$out/kernels_decode.jsonl" --commit "$commit" ;;
    icecache) decode 300 shape=llama-3.1-8b length=36864 method=full,icecache,icecache-reuse host_bytes=120000000000 ;;
    captured) decode 400 shape=llama-3.1-8b length=36864,131072 method=full,oracle,pariskv,clusterkv,prkv,quest,arkvale budget=1024 host_bytes=120000000000 ;;
  esac
  echo "== $part took $((SECONDS - begin)) s"
done
