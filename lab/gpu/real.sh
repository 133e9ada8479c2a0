#!/usr/bin/env bash
# KL of all methods on pretrained models: each .gpu/real/*.gguf, on the prompts of each .gpu/real/*.jsonl ("prompt" in every line).
# usage: real.sh FOLDER COMMIT SECONDS [PROCESSES [LIMIT [BUDGETS [TOKENS [DTYPE]]]]]    nothing is timed; it may run beside parts that are not timed
# .gpu/packages.tar.xz must hold the packages gguf and accelerate, where the machine lacks them. models/real.py brings the models. Processes divide
# the methods among them; all methods see the first 8 prompts before any sees the next 8. A model with windows of its own takes one prompt at a
# time. What stands in FOLDER is not run again. 27 methods, 15 prompts of SmolLM2 in float32: 110 s on an H200 in 5 processes.
# Publish: python3 -m lab.real_models --publish FOLDER/real_models.*.jsonl
set -u
out=$1 commit=$2 end=$((SECONDS + $3 - 5)) many=${4:-6} limit=${5:-8} budgets=${6:-256,1024} tokens=${7:-24} dtype=${8:-auto}
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mapfile -t methods < <(python3 -c 'from kvthaw.methods import METHODS; print(*(name for name in METHODS if name != "full"), sep="\n")')
measure() { # I MODEL PROMPTS METHODS
  local left=$((end - SECONDS)) batch=8
  [[ $2 == *gemma* ]] && batch=1
  ((left > 25)) || { echo "no time left: $2 $4"; return 0; }
  timeout -k 3 "$left" python3 -m lab.real_models "$2" "$out/real_models.$1.jsonl" --prompts "$3" --limit "$limit" --batch "$batch" --dtype "$dtype" \
    --method "$4" --budget "$budgets" --tokens "$tokens" --seconds $((left - 15)) --commit "$commit" >> "$out/real_models.$1.log" 2>&1
}
share() { # I MODEL PROMPTS: every n-th method; where one of them fails, the others go on without it
  local mine=() i one
  for ((i = $1; i < ${#methods[@]}; i += many)); do mine+=("${methods[i]}"); done
  measure "$1" "$2" "$3" "$(IFS=,; echo "${mine[*]}")" && return
  for one in "${mine[@]}"; do measure "$1" "$2" "$3" "$one" || echo "not all: $2 $one"; done
}
for model in .gpu/real/*.gguf; do
  for prompts in .gpu/real/*.jsonl; do
    for ((process = 0; process < many; process++)); do share "$process" "$model" "$prompts" & done
    wait
    echo "$model $prompts: $SECONDS s"
  done
done
grep -h "kvthaw:\|Error" "$out"/real_models.*.log | sort | uniq -c | cut -c1-300
wc -l "$out"/real_models.*.jsonl
