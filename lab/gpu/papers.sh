#!/usr/bin/env bash
# The papers' tables and figures of accuracy on a pretrained model: .gpu/real/*.gguf, LongBench's files in .gpu/real/longbench.
# usage: papers.sh FOLDER COMMIT SECONDS NAMES [PROCESSES [LIMIT [DTYPE]]]    nothing is timed; it may run beside parts that are not timed
# .gpu/packages.tar.xz must hold the packages gguf and accelerate, where the machine lacks them. models/real.py brings the models, and
# lab/longbench_files.py makes the files. Processes divide the rows of each name among them. What stands in FOLDER is not run again.
# Publish: python3 -m lab.real_papers --publish FOLDER/lines.*.jsonl
set -u
out=$1 commit=$2 end=$((SECONDS + $3 - 5)) names=$4 many=${5:-6} limit=${6:-4} dtype=${7:-bfloat16}
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
measure() { # I MODEL MORE...
  local number=$1 model=$2
  shift 2
  timeout -k 3 $((end - SECONDS)) python3 -m lab.real_papers "$model" "$out/papers.$number.jsonl" --data .gpu/real/longbench --limit "$limit" \
    --dtype "$dtype" --names "$names" --commit "$commit" "$@" >> "$out/papers.$number.log" 2>&1
}
for model in .gpu/real/*.gguf; do
  for ((process = 0; process < many; process++)); do measure "$process" "$model" --part "$process/$many" & done
  wait
  cat "$out"/papers.[0-9]*.jsonl > "$out/papers.all.jsonl"
  measure all "$model" --lines "$out/lines.$(basename "$model" .gguf).jsonl" || echo "not all: $model"
  echo "$model: $SECONDS s"
done
wc -l "$out"/papers.*.jsonl
