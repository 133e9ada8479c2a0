#!/usr/bin/env bash
# Steps in which clusters are formed, clusterkv-plus, 95 s on an H200: of generated tokens in one sequence of 128k (8 layers, KV drawn, two batches
# of 320) and in eight of 32k; of prompts of 8k to 16k that join three others (all layers, rows on the device); clusterkv, whose last key comes late.
# Goals: no step above 1.3 medians for generated tokens, a step after a join 1.2.
# Publish: lines to lab/results/spikes.jsonl, spilling.jsonl and running.jsonl, their figures to docs/notes/index-updates.md and serving.md.
out=$1 commit=$2 most=$3
left() { echo $((most - SECONDS - 2)); }
timeout -k 2 50 python3 -m lab.running --method clusterkv-plus --device-memory auto --requests 8 --commit "$commit" --out "$out/running.jsonl"
timeout -k 2 "$(left)" python3 -m lab.spilling --method clusterkv-plus --device-memory auto --steps 660 --commit "$commit" --out "$out/spilling.jsonl"
timeout -k 2 "$(left)" python3 -m lab.spikes --filled --method clusterkv-plus,clusterkv --steps 660 --commit "$commit" --out "$out/spikes.jsonl"
