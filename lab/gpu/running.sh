#!/usr/bin/env bash
# A running batch of four sequences of 8k to 16k, all layers of the 8B shape, rows on the device; 85 s on an H200. Goals, of full's median
# step: auto 1.05, fixed methods 1.25; 95th percentile 1.2 of the median. full and auto come twice: the device gets slower by some percent
# within a run, whichever is first. Steps after a join, and those with which a request ends, are told apart.
# Publish: python3 -m lab.speed OUT/running, then the sentences of docs/notes/serving.md.
timeout $(($3 - 2)) python3 -m lab.running --method pariskv-plus,clusterkv-plus,prkv,full,auto,full,auto --device-memory auto \
  --requests 8 --commit "$2" --out "$1/running.jsonl"
