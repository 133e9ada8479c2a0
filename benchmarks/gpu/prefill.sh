#!/usr/bin/env bash
# 128k tokens through 4 layers of the 8B shape in chunks of 16k beside one pass; encoding their keys; attention by runs; a profile of both.
# usage: prefill.sh FOLDER COMMIT SECONDS; an H200, alone on it, 60 s: lines come as they are measured, the most important first.
# Goals: ratio at most 1.02 for every method (pariskv-plus 1.046 before), encode under 300 us (314). If a run of 16,384 keys has as many
# TFLOP/s as longer ones, merging was all that they save; if another shape of the kernel is faster, it is the one to keep.
# Publish: lines with a ratio to benchmarks/results/prefill.jsonl, encode to kernels_pariskv.jsonl; docs/notes/prefill.md and gpu-kernels.md.
exec timeout -k 3 $(($3 - 3)) python3 -m benchmarks.one_pass --out "$1/one_pass.jsonl" --commit "$2" --layers 4 \
  --methods pariskv-plus,clusterkv-plus,prkv --parts encode,prompts,profile,attention
