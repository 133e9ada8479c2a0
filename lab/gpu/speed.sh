#!/usr/bin/env bash
# Compiled steps of one sequence at 128k, 512k and 1M, full attention over 8-bit KV in the same run, prompts in chunks, kernels.
# usage: speed.sh FOLDER COMMIT SECONDS; an H200, alone on it, 270 s or more: what there is no time left for is left out.
# Then: python -m lab.speed FOLDER, and its sentences in docs/notes/decode-path.md.
# Goals, ms a token at 36k / 128k / 512k / 1M: pariskv-plus 5.5 / 6.0 / 7.8 / 10.5; clusterkv(-plus), prkv(-plus) 6.0 / 6.5 / 8.0; means at
# most 1.1 of medians, 99th percentiles 1.5. 128k in chunks at most 1.02 of one pass; encoding 128k keys under 300 us.
exec timeout -k 3 $(($3 - 3)) python3 -m lab.timings --out "$1" --commit "$2" --seconds $(($3 - 8))
