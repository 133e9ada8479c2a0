#!/usr/bin/env bash
# pariskv-plus's candidates, estimates and rows in one launch, a cluster of 8 or 16 blocks a KV head, beside the three launches: rows
# compared, then us a layer at 36k to 1M, alone, within select and within all launches of a layer; captured steps of 8 layers; tests.
# Alone on an H200, 90 s. usage: cluster.sh FOLDER COMMIT SECONDS
# Expected (docs/notes/decode-path.md): choice 8 us at 36k for 15. publish: lines to benchmarks/results/kernels_rows.jsonl, then that note.
out=$1 commit=$2 most=$3
timeout -k 2 $((most - SECONDS - 45)) python3 -m benchmarks.kernels_rows --commit "$commit" --out "$out/kernels_rows.jsonl"
timeout -k 2 18 python3 -m pytest -c pyproject.toml --rootdir . -p no:benchmark -q -m gpu tests/kernels/test_choose_rows.py > "$out/tests.log" 2>&1
tail -n 3 "$out/tests.log"
for blocks in 0 16 8; do
  ((most - SECONDS > 10)) || continue
  timeout -k 2 $((most - SECONDS - 2)) python3 -c "from benchmarks import kernels_rows, second_token
kernels_rows.use($blocks); second_token.main()" --prompts 0xpariskv-plus/36864/8@96,0xpariskv-plus/131072/8@96 --commit "$commit" --out "$out/steps_$blocks.jsonl"
done
