#!/usr/bin/env bash
# KL of all methods under 64, 256 and 1,024 tokens on pretrained models: each .gpu/real/*.gguf, on the book that ships and on each .gpu/real/*.txt.
# usage: real.sh FOLDER COMMIT SECONDS [LENGTHS [PROMPTS]]    nothing is timed; it may run beside parts that are not timed
# .gpu/packages.tar.xz must hold the package gguf. models/real.py brings the models. What stands in FOLDER is not run again. Append
# FOLDER/real_models.jsonl to that of earlier runs, then publish: python3 -m benchmarks.real_models --publish FILE...
set -u
out=$1 commit=$2 end=$((SECONDS + $3 - 3)) lengths=${4:-2048,4096,7936} prompts=${5:-8}
for model in .gpu/real/*.gguf; do
  for text in "" .gpu/real/*.txt; do
    [ -z "$text" ] || [ -e "$text" ] || continue
    ((end - SECONDS > 30)) || { echo "no time left: $model $text"; continue; }
    timeout -k 3 $((end - SECONDS)) python3 -m benchmarks.real_models "$model" "$out/real_models.jsonl" --length "$lengths" --prompts "$prompts" \
      ${text:+--text "$text"} --seconds $((end - SECONDS - 15)) --commit "$commit" || echo "not all: $model $text"
  done
done
wc -l "$out/real_models.jsonl"
