#!/usr/bin/env bash
# early.sh FOLDER COMMIT SECONDS: rows fetched during an MLP, by programs (30 s), then compiled steps of thaw with predicted queries and
# without, 36k to 1M (200 s); alone on a GPU. Goals: both_us no more than mlp_us; steps of 6.2, 8.0 and 9.5 ms at 128k, 512k and 1M.
# Publish: lines to lab/results/kernels_beside.jsonl and thaw_steps.jsonl, and to docs/notes/early-choices.md.
set -u
out=$1 commit=$2 most=$3
timeout -k 2 60 python3 -m lab.kernels_beside --out "$out/kernels_beside.jsonl" --commit "$commit"
timeout -k 3 $((most - SECONDS - 3)) python3 -m lab.figures early --host-bytes 120000000000 --out "$out/early.jsonl" --commit "$commit" 2>&1 |
  grep --line-buffered -avE 'AUTOTUNE|triton_mm_|SingleProcess|^strides|^dtypes|^  mm ' | cut -c1-400
