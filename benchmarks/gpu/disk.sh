#!/usr/bin/env bash
# disk.sh FOLDER COMMIT SECONDS: a document of 128k that a new process restores from the page cache (8B shape, 32 layers, 17 GB on the
# disk for a while; goal 2.5 s, reckoned 1.2), and a card of 24 GiB at 128k: auto, DynamicCache, which should run out of memory, and
# OffloadedCache, these two over drawn keys and values; then a kept prompt of 32k that goes to a file and comes back. About 45, 40 and
# 25 s of an H200.
# publish: lines of restored.jsonl, small_card.jsonl and filed.jsonl to benchmarks/results, their times to docs/notes/placement.md, Saved and restored.
set -u
out=$1 commit=$2 most=$3 shape=${4:-llama-3.1-8b} length=${5:-131072}
left() { echo $((most - SECONDS - 2)); }
timeout -k 2 "$(left)" python3 -m benchmarks.restored --shape "$shape" --length "$length" --host-memory 100GB --out "$out/restored.jsonl" --commit "$commit"
timeout -k 2 "$(left)" python3 -m benchmarks.small_card --shape "$shape" --lengths "$length" --cards small --host-memory 100GB --steps 12 \
  --contenders kvthaw,dynamic,offloaded --filled dynamic,offloaded --out "$out/small_card.jsonl" --commit "$commit"
timeout -k 2 "$(left)" python3 -m benchmarks.filed --shape "$shape" --length "$((length / 4))" --host-memory 100GB --out "$out/filed.jsonl" --commit "$commit"
