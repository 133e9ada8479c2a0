#!/usr/bin/env bash
# On a machine with a GPU and no network: build, check, then measure. Results come as JSON lines in the folder given.
# usage: benchmarks/gpu.sh OUT COMMIT PART...   parts: check, kernels, pages, baseline, goals, throughput, ... see below
set -uo pipefail
out=$1 commit=$2
shift 2
host=120000000000 model="shape=llama-3.1-8b host_bytes=$host"
sparse=pariskv:retrieved=100,clusterkv:budget=1024:hits=0.7,prkv:budget=1024:hits=0.7
few=pariskv:retrieved=100,clusterkv:iterations=4:budget=1024:hits=0.7,prkv:budget=1024:hits=0.7 # k-means of millions of keys takes its time
export PYTHONUNBUFFERED=1
python3 -m pip install --quiet --no-build-isolation --no-deps . || exit 1
run() { local seconds=$1; shift; echo "== $*"; timeout "$seconds" "$@" 2>&1 | tail -"${LINES_SHOWN:-25}"; }
decode() { run "$1" python3 -m kvthaw.bench.decode out="$out/decode.jsonl" commit="$commit" "${@:2}" | cut -c1-900; }
for part in "$@"; do
  begin=$SECONDS
  case $part in
    check) run 240 python3 -m pytest -q -x --no-header -m gpu tests/engine/test_decode.py tests/kernels -p no:warnings ;;
    checkall) run 300 python3 -m pytest -q --no-header -m gpu tests/engine/test_decode.py tests/cache tests/index tests/kernels -p no:warnings -n 8 ;;
    kernels) for bench in kernels_decode kernels_pariskv kernels_pages; do run 150 python3 -m "kvthaw.bench.$bench" --json --out "$out/$bench.jsonl" --commit "$commit"; done ;;
    pages) for bench in kernels_pages kernels_transfer; do run 150 python3 -m "kvthaw.bench.$bench" --json --out "$out/$bench.jsonl" --commit "$commit"; done
      run 200 python3 -m kvthaw.bench.indexing shape=llama-3.1-8b length=32768 method=clusterkv,prkv out="$out/indexing.jsonl" commit="$commit" | cut -c1-700 ;;
    nodes) run 150 python3 -m kvthaw.bench.kernels_nodes --json --out "$out/kernels_nodes.jsonl" --commit "$commit" | cut -c1-700 ;;
    decode-kernels) run 150 python3 -m kvthaw.bench.kernels_decode --json --out "$out/kernels_decode.jsonl" --commit "$commit" ;;
    tree) run 100 python3 -m kvthaw.bench.kernels_tree --layers 6 --threads 16 --json --out "$out/kernels_tree.jsonl" --commit "$commit" | cut -c1-330 ;;
    baseline) decode 200 $model length=36864 method=hf-dynamic,hf-offloaded,full,icecache,icecache-reuse steps=eager new_tokens=32 ;;
    icecache) decode 300 $model length=36864 steps=eager method=full,icecache,icecache:query_beam=64,icecache:transfer=bulk,icecache:preset=paper,icecache-reuse ;;
    goals) decode 400 $model prompt=filled steps=captured,compiled new_tokens=256 length=36864,131072 method=full,$sparse \
      -- $model prompt=filled steps=captured new_tokens=256 length=36864,131072 method=clusterkv:budget=1024,prkv:budget=1024 \
      -- $model prompt=filled steps=compiled new_tokens=256 length=524288 share_host=1 method=full,$few ;;
    goals-icecache) decode 200 $model prompt=filled steps=eager new_tokens=48 length=36864,131072 method=icecache,icecache-reuse \
      -- $model prompt=filled steps=captured,compiled budget=256 new_tokens=256 length=36864,131072 method=icecache-device ;;
    foresee) run 100 python3 -m pytest -q --no-header -m gpu tests/cache/test_foreseen.py -p no:warnings
      decode 300 $model prompt=filled steps=eager new_tokens=48 length=36864,131072 method=icecache,icecache:foresee=True,icecache:foresee=True:threads=8,icecache-reuse,icecache-reuse:foresee=True ;;
    million) decode 200 $model prompt=filled steps=captured,compiled new_tokens=256 length=1048576 share_host=1 method=$few ;;
    breakdown) decode 200 $model prompt=filled steps=captured profile=1 length=131072 method=full,$sparse ;;
    length) run 500 python3 -m kvthaw.bench.figures name=length steps=compiled plot="$out" out="$out/decode.jsonl" commit="$commit" host_bytes=$host | cut -c1-300 ;; # after goals: their lines count
    prefill-check) run 240 python3 -m pytest -q --no-header -m gpu tests/cache/test_past.py tests/engine/test_prefill.py tests/kernels/test_merge.py \
      tests/kernels/test_dense.py -p no:warnings ;;
    prefill) run 400 python3 -m kvthaw.bench.prefill $model length=131072 chunk=8192,16384 method=full,pariskv:preset=paper,pariskv retrieved=100 out="$out/prefill.jsonl" commit="$commit" | cut -c1-900 ;;
    prefill-icecache) run 400 python3 -m kvthaw.bench.prefill $model length=131072 chunk=16384 method=icecache budget=256 out="$out/prefill.jsonl" commit="$commit" | cut -c1-900 ;;
    prefill-long) run 560 python3 -m kvthaw.bench.prefill $model length=524288 chunk=16384 method=pariskv retrieved=100 chunks_only=1 out="$out/prefill.jsonl" commit="$commit" | cut -c1-900 ;;
    throughput | icecache-memory | icecache-scaling | pariskv-batches | clusterkv-latency | prkv-latency)
      run 500 python3 -m kvthaw.bench.figures name="$part" plot="$out" out="$out/$part.jsonl" commit="$commit" host_bytes=$host | cut -c1-300 ;;
  esac
  echo "== $part took $((SECONDS - begin)) s"
done
