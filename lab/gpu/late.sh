#!/usr/bin/env bash
# Steps that are later than the median: prkv's refresh at 512k, requests that end and join in a running batch under prkv, and the first clusters
# of generated tokens under clusterkv-plus; 45 s on an H200, the first two of which take 25. Goals as in spikes.sh and running.sh, which have more.
# Publish: as they say.
out=$1 commit=$2 most=$3
left() { echo $((most - SECONDS - 1)); }
timeout -k 2 "$(left)" python3 -m lab.spikes --filled --method prkv --length 524288 --steps 192 --commit "$commit" --out "$out/spikes.jsonl"
timeout -k 2 "$(left)" python3 -m lab.running --method prkv --device-memory auto --requests 8 --commit "$commit" --out "$out/running.jsonl"
timeout -k 2 "$(left)" python3 -m lab.spilling --method clusterkv-plus --device-memory 4GiB --steps 660 --commit "$commit" --out "$out/spilling.jsonl"
