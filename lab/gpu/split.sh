#!/usr/bin/env bash
# Two GPUs of one host: sums alone, and decode steps of the 8B shape at 128k.
# usage: split.sh FOLDER COMMIT SECONDS [METHODS]; alone on the machine, about 20 s a method.
# Goal: at most 4.5 ms a token; floor: docs/notes/decode-path.md.
# Publish: append sums.jsonl to lab/results/all_reduce.jsonl and steps.jsonl to lab/results/tensor_parallel.jsonl.
set -u
out=$1 commit=$2 most=$3
export OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1
for method in ${4:-full pariskv-plus:retrieved=100 thaw:retrieved=100}; do
  sums=()
  [ "$method" = full ] && sums=(--sums "$out/sums.jsonl")
  timeout $((most - SECONDS > 20 ? most - SECONDS - 5 : 15)) python3 -m torch.distributed.run --nproc-per-node 2 -m lab.split \
    --method "$method" --steps captured --new-tokens 200 --out "$out/steps.jsonl" --commit "$commit" --unchecked "${sums[@]}" 2>&1 | tail -n 4
done
