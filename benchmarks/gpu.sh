#!/usr/bin/env bash
# On a machine with a GPU and no network: build, check, then measure. Results come as JSON lines in the folder given, each as it is
# measured; a part that stands there already is not measured again.
# usage: benchmarks/gpu.sh OUT COMMIT PART[@SECONDS]...
#   parts: check, checkall, kernels, pages, ... see below; figures=NAME,NAME,... (`kvthaw bench figures`): one process, one compilation
set -uo pipefail
out=$1 commit=$2
shift 2
host=$((120000000000 * $(nvidia-smi -L | wc -l))) model="shape=llama-3.1-8b host_bytes=$host"
sparse=pariskv:retrieved=100,clusterkv:budget=1024:hits=0.7,prkv:budget=1024:hits=0.7
export PYTHONUNBUFFERED=1
mkdir -p "$out"
python3 -m pip install --quiet --no-build-isolation --no-deps . || exit 1
run() { # SECONDS COMMAND...: fewer where the part's own are fewer
  local seconds=$(($1 < most ? $1 : most)); shift
  echo "== $*"
  timeout -k 5 "$seconds" "$@" 2>&1 | grep --line-buffered -avE 'AUTOTUNE|triton_mm_|SingleProcess|^strides|^dtypes|^  mm ' | stdbuf -oL cut -c1-400
}
bench() { local seconds=$1 name=$2; shift 2; run "$seconds" python3 -m "kvthaw.bench.$name" commit="$commit" "$@"; }
kernels() { run 150 python3 -m "kvthaw.bench.$1" "${@:2}" --json --out "$out/$1.jsonl" --commit "$commit"; }
tests() { run 300 python3 -m pytest -q --no-header -m gpu -p no:warnings "$@"; }
for part in "$@"; do
  begin=$SECONDS most=580 name=$part
  [[ $part == *@* ]] && most=${part##*@} name=${part%@*}
  case $name in
    check) tests -x tests/engine/test_decode.py tests/kernels ;;
    checkall) tests tests/engine/test_decode.py tests/cache tests/index tests/kernels -n 8 ;;
    prefill-check) tests tests/cache/test_past.py tests/engine/test_prefill.py tests/kernels/test_merge.py tests/kernels/test_dense.py ;;
    foresee-check) tests tests/cache/test_foreseen.py ;;
    kernels) for one in kernels_decode kernels_pariskv kernels_pages; do kernels $one; done ;;
    pages) for one in kernels_pages kernels_transfer; do kernels $one; done
      bench 200 indexing shape=llama-3.1-8b length=32768 method=clusterkv,prkv out="$out/indexing.jsonl" ;;
    nodes) kernels kernels_nodes ;;
    decode-kernels) kernels kernels_decode ;;
    tree) kernels kernels_tree --layers 6 --threads 16 ;;
    figures=*) bench 580 figures name="${name#figures=}" out="$out/decode.jsonl" host_bytes="$host" ;;
    icecache) bench 300 decode out="$out/decode.jsonl" $model length=36864 steps=eager \
      method=full,icecache,icecache:query_beam=32,icecache:transfer=bulk,icecache:preset=paper,icecache-reuse ;;
    breakdown) for one in full ${sparse//,/ }; do # nothing is timed after a profile in the same process
        bench 100 decode out="$out/breakdown.jsonl" $model prompt=filled steps=captured profile=1 length=131072 method="$one"
      done ;;
    prefill) # of 512k tokens four layers: all would take 130 s, twice; what one pass of full attention takes is known
      cp -n benchmarks/results/prefill.jsonl "$out/"
      bench 400 prefill out="$out/prefill.jsonl" $model length=131072 chunk=16384 method=pariskv retrieved=100 chunks_only=1 \
        -- $model length=524288 chunk=16384 method=pariskv retrieved=100 chunks_only=1 layers=4 \
        -- $model length=131072 chunk=16384 method=icecache budget=256 chunks_only=1 \
        -- $model length=131072 chunk=16384 method=pariskv retrieved=100 ;;
    serving) bench 200 serving shape=llama-3.1-8b length=16384 lanes=4 requests=6 new_tokens=64 method=full,pariskv,clusterkv,prkv \
      budget=1024 out="$out/serving.jsonl" ;;
    *) echo "no part $name"; exit 2 ;;
  esac
  echo "== $part took $((SECONDS - begin)) s"
done
