#!/usr/bin/env bash
# Single steps of one sequence, KV drawn: prkv at 512k, four methods over two periods of updates at 128k; and steps while blocks spill and come
# back under clusterkv-plus; 8 layers, 90 s on an H200. Goals: mean at most 1.1 of the median, p99 1.5; while blocks move no step above 1.3.
# Publish: lines to lab/results/spikes.jsonl and spilling.jsonl, their figures to docs/notes/index-updates.md and placement.md.
out=$1 commit=$2 most=$3
steps() { timeout -k 2 $((most - SECONDS - 2)) python3 -m lab.spikes --filled --commit "$commit" --out "$out/spikes.jsonl" "$@"; }
timeout -k 2 $((most / 2)) python3 -m lab.spilling --method clusterkv-plus --device-memory 4GiB --commit "$commit" --out "$out/spilling.jsonl"
steps --method prkv --length 524288 --steps 384
steps --method prkv-plus,pariskv-plus,prkv,clusterkv-plus
