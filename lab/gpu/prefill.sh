#!/usr/bin/env bash
# 512k tokens through 2 layers of the 8B shape in chunks of 16k; encoding 128k keys; 128k through 4 layers in chunks beside one pass.
# usage: prefill.sh FOLDER COMMIT SECONDS; an H200, alone on it, 60 s (40 for the first): lines come as they are measured.
# Goals: 512k at most 1.15 times what compute allows (over_floor); encode under 300 us; chunks at most 1.02 of one pass (ratio). Where time
# goes: python3 -m lab.one_pass --methods pariskv-plus,clusterkv-plus,prkv.
# Publish: prefill.jsonl and one_pass.jsonl to the files of their names in lab/results; docs/notes/prefill.md and gpu-kernels.md.
end=$((SECONDS + $3 - 3))
timeout -k 3 $((end - SECONDS)) python3 -m lab.timings --out "$1" --commit "$2" --seconds $(($3 - 6)) \
  --jobs "prompt pariskv-plus 512 16 2"
exec timeout -k 3 $((end - SECONDS)) python3 -m lab.one_pass --out "$1/one_pass.jsonl" --commit "$2" --layers 4 --quick \
  --parts encode,prompts
