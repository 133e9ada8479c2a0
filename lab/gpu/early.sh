#!/usr/bin/env bash
# early.sh FOLDER COMMIT SECONDS: rows fetched during an MLP, by programs (30 s). Then captured steps of thaw with predicted queries and
# without, 36k to 1M (200 s). Alone on a GPU. Goals: both_us is no more than mlp_us; steps of 6.2, 8.0 and 9.5 ms at 128k, 512k, 1M.
# Publish: lines to lab/results/kernels_beside.jsonl and thaw_steps.jsonl, and to docs/notes/decode-path.md.
set -u
out=$1 commit=$2 most=$3
timeout -k 2 60 python3 -m lab.kernels_beside --out "$out/kernels_beside.jsonl" --commit "$commit"
bash "$(dirname "$0")/figures.sh" "$out" "$commit" $((most - SECONDS)) early
