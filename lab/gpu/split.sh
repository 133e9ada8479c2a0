#!/usr/bin/env bash
# Two GPUs of one host: the tests that need both, sums alone, and decode steps of the 8B shape at 128k, captured and compiled.
# usage: split.sh FOLDER COMMIT SECONDS; alone on the machine, about 300 s. Of these compiling a step of each method takes 40.
# Goal: at most 4.5 ms a token, compiled; floor: docs/notes/decode-path.md. tests.log has what pytest printed.
# Publish: append sums.jsonl to lab/results/all_reduce.jsonl and steps.jsonl to lab/results/tensor_parallel.jsonl.
set -u
out=$1 commit=$2 most=$3
export OMP_NUM_THREADS=4 TORCHINDUCTOR_COMPILE_THREADS=8 HF_HUB_OFFLINE=1
timeout 150 python3 -m pytest -c pyproject.toml --rootdir . -m gpu -p no:benchmark -q --timeout 140 --tb short tests/engine/test_tensor_parallel.py \
  > "$out/tests.log" 2>&1
tail -n 1 "$out/tests.log"
for method in full pariskv-plus:retrieved=100 thaw:budget=1024; do
  sums=()
  [ "$method" = full ] && sums=(--sums "$out/sums.jsonl")
  timeout $((most - SECONDS > 20 ? most - SECONDS - 5 : 15)) python3 -m torch.distributed.run --nproc-per-node 2 -m lab.split \
    --method "$method" --steps compiled,captured --new-tokens 200 --out "$out/steps.jsonl" --commit "$commit" --unchecked "${sums[@]}" 2>&1 | tail -n 4
done
