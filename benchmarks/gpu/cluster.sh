#!/usr/bin/env bash
# pariskv-plus's candidates, estimates and rows in one launch, a cluster of 8 or 16 blocks a KV head, beside the three launches: compiled
# steps at 36k and 128k, then rows compared, and us a layer at 36k to 1M, alone, within select and within all launches of a layer.
# Alone on an H200, 180 s: a fresh machine takes 50 s until the first line. usage: cluster.sh FOLDER COMMIT SECONDS
# Expected (docs/notes/decode-path.md): choice 8 us at 36k for 15, so 5.6 ms a step for 5.79. publish: lines of kernels_rows.jsonl to
# benchmarks/results, steps to the note alone, since decode.jsonl has no name for what the product does not use.
out=$1 commit=$2 most=$3
mkdir -p "$out"/steps_{0,16}
for blocks in 0 16; do
  timeout -k 2 $((most / 3)) python3 -c "from benchmarks import kernels_rows, timings
kernels_rows.use($blocks); timings.main()" --out "$out/steps_$blocks" --commit "$commit" --seconds $((most / 3 - 5)) \
    --jobs "steps pariskv-plus:retrieved=100 36 512,steps pariskv-plus:retrieved=100 128 512"
done
timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.kernels_rows --commit "$commit" --out "$out/kernels_rows.jsonl"
