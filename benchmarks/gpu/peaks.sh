#!/usr/bin/env bash
# Peak tokens a second: batches that fill an H200, all layers of the 8B shape, full attention beside indexes in one run; 170 s, the cells of
# the goals within 110. Goals, of full's peak: 32k 2.5, with rows of 8 bits 3.5; 128k 3.2 and 4.5. Other GPUs: CELLS=...
# .gpu/in_place.patch, if it is there, is another attention over rows in blocks, which is timed and checked first and taken where it is
# faster: git diff 99aed6c 99aed6c^ -- src > .gpu/in_place.patch
# Publish: python3 -m benchmarks.speed OUT/peaks, then the sentences of docs/notes/placement.md.
set -u
out=$1 commit=$2 most=$3 tree=main
attention() { timeout 40 python3 -m benchmarks.kernels_batches --only-attention --batches 11,44 --lengths 32768,131072 --most 1500000 \
  --commit "$commit" --out "$out/kernels-$1.jsonl" 2> "$out/kernels-$1.err" > /dev/null; }
eight_bit_us() { python3 -c 'import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
print(round(sum(line["us"] for line in lines if line["kv_dtype"] and line["method"] == "clusterkv-plus")))' "$1"; }
if [ -e .gpu/in_place.patch ]; then
  attention main && before=$(eight_bit_us "$out/kernels-main.jsonl")
  room=$(mktemp -d) root=$PWD
  cp -r src benchmarks tests pyproject.toml "$room"
  if { patch -d "$room" -s -p1 < .gpu/in_place.patch || (cd "$room" && git apply "$root/.gpu/in_place.patch"); } && cd "$room"; then
    own=$PYTHONPATH
    export PYTHONPATH=${own//$root/$room}
    if attention patch && after=$(eight_bit_us "$out/kernels-patch.jsonl") && ((after < ${before:-0} * 97 / 100)); then tree=patch
    else cd "$root" && export PYTHONPATH=$own
    fi
  fi
fi
echo "attention over rows in blocks: $tree (8 bits: ${before:-} us before, ${after:-} with the patch)" | tee "$out/tree"
cells=full/28x32768,clusterkv-plus/fp8/44x32768,clusterkv-plus/25x32768
cells+=,full/7x131072,clusterkv-plus/fp8/11x131072,clusterkv-plus/6x131072,clusterkv-plus/compile/6x131072,full/compile/7x131072
cells+=,pariskv-plus/fp8/9x131072,pariskv-plus/5x131072,clusterkv-plus/fp8/compile/11x131072,clusterkv-plus/24x32768,clusterkv-plus/8x131072
timeout $((most - SECONDS - 18)) python3 -m benchmarks.peaks --cells "${CELLS:-$cells}" --commit "$commit" --out "$out/peaks.jsonl" 2> "$out/peaks.err"
tail -n 20 "$out/peaks.err" | cut -c1-300
timeout $((most - SECONDS - 2)) python3 -m pytest -q -m gpu -n 8 -p no:cacheprovider tests/kernels/test_in_place.py
