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
    checkall) run 300 python3 -m pytest -q --no-header -m gpu tests/engine/test_decode.py tests/cache tests/index tests/kernels -p no:warnings -n 8 ;;
    kernels) for bench in kernels_decode kernels_pariskv kernels_pages; do run 150 python3 -m "kvthaw.bench.$bench" --json --out "$out/$bench.jsonl" --commit "$commit"; done ;;
    decode-kernels) run 150 python3 -m kvthaw.bench.kernels_decode --json --out "$out/kernels_decode.jsonl" --commit "$commit" ;;
    tree) run 100 python3 -m kvthaw.bench.kernels_tree --layers 6 --threads 16 --json --out "$out/kernels_tree.jsonl" --commit "$commit" | cut -c1-330 ;;
    icecache) decode 300 shape=llama-3.1-8b length=36864 method=full,icecache,icecache:query_beam=64,icecache:transfer=bulk,icecache:preset=paper,icecache-reuse host_bytes=120000000000 ;;
    captured) decode 300 shape=llama-3.1-8b length=36864 method=full,clusterkv,prkv,quest,arkvale budget=1024 only=captured host_bytes=120000000000
      decode 100 shape=llama-3.1-8b length=36864 method=pariskv retrieved=100 only=captured host_bytes=120000000000 ;;
    long) decode 200 shape=llama-3.1-8b length=131072 method=full,clusterkv,prkv budget=1024 only=captured host_bytes=120000000000
      decode 100 shape=llama-3.1-8b length=131072 method=pariskv retrieved=100 only=captured host_bytes=120000000000 ;;
    compiled) decode 300 shape=llama-3.1-8b length=36864 method=full,clusterkv budget=1024 only=compiled compile=1 host_bytes=120000000000
      decode 200 shape=llama-3.1-8b length=36864 method=pariskv retrieved=100 only=compiled compile=1 host_bytes=120000000000 ;;
  esac
  echo "== $part took $((SECONDS - begin)) s"
done
