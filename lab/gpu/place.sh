#!/usr/bin/env bash
# Seconds to the first token of 200 new tokens on a document of 128k that the process has read, blocks on the device. Some 45 s of an H200
# for all 32 layers (goal .5 s; reckoned from 8 layers .45 under full attention, .84 under pariskv-plus with rows on the host) and 20 s for
# 8 layers, whose tokens are compared with those of a fresh prefill.
# publish: lines of prefix.jsonl to lab/results/prefix.jsonl, and their times to docs/notes/placement.md, Saved and restored.
out=$1 commit=$2 most=$3
ask() {
  timeout -k 2 $((most - SECONDS - 2)) python3 -m lab.prefix --unsaved --device-memory auto --commit "$commit" --out "$out/prefix.jsonl" "$@"
}
ask --method pariskv-plus,auto --repeats 3 --fresh 0
ask --method pariskv-plus --layers 8 --repeats 2 --fresh 1
