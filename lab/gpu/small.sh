#!/usr/bin/env bash
# small.sh FOLDER COMMIT SECONDS: prompts of 128k, and of 208k, on 24 GiB of the card: the 8B shape in bf16 and in int4, Qwen3-4B.
# Alone on a GPU; 120 s of an H200; int4 needs torchao, as quant.sh does. Goal: what kvthaw plan says fits does; no line has an error.
# Publish: small_card.jsonl to lab/results, its times to docs/planning.md.
set -u
out=$1 commit=$2 most=$3
card() {
  timeout -k 2 $((most - SECONDS - 3)) python3 -m lab.small_card --cards small --contenders kvthaw --steps 24 --host-memory 100GB \
    --out "$out/small_card.jsonl" --commit "$commit" "$@"
}
card --shape qwen3-4b --lengths 131072
card --shape llama-3.1-8b --weights int4 --lengths 131072
card --shape llama-3.1-8b --lengths 131072,212736
