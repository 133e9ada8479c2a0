#!/usr/bin/env bash
# A running batch of four sequences of 8k to 16k, all layers of the 8B shape, rows on the device; 75 s on an H200. Goals, of full's median
# step: auto 1.05, fixed methods 1.25; 95th percentile 1.2 of the median. Then where the half millisecond lies that auto takes beside full
# although it is full attention: host_us is the host's part of a step, device_ms the device's.
# Publish: python3 -m benchmarks.speed OUT/running, then the sentences of docs/notes/serving.md.
timeout $(($3 * 2 / 3)) python3 -m benchmarks.running --method full,auto,pariskv-plus,clusterkv-plus,prkv --device-memory auto --requests 8 \
  --commit "$2" --out "$1/running.jsonl"
timeout $(($3 - SECONDS - 2)) python3 -m benchmarks.running --method full,auto,full --device-memory none,auto --shortest 8192 --turns 0 --steps \
  --commit "$2" --out "$1/running.jsonl"
