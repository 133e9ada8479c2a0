#!/usr/bin/env bash
# disk.sh FOLDER COMMIT SECONDS: a document of 128k that a new process restores from the page cache (8B shape, 32 layers, 17 GB on the
# disk for a while; goal 2.5 s, 4.5 at 5586bcc); a kept prompt of 32k that goes to a file and comes back; a card of 24 GiB at 128k: auto,
# and OffloadedCache over drawn keys and values. About 45, 25 and 60 s of an H200.
# publish: lines of restored.jsonl, filed.jsonl and small_card.jsonl to lab/results, their times to docs/notes/placement.md.
set -u
out=$1 commit=$2 most=$3 shape=${4:-llama-3.1-8b} length=${5:-131072}
left() { echo $((most - SECONDS > 3 ? most - SECONDS - 2 : 1)); }
timeout -k 2 "$(left)" python3 -m lab.restored --shape "$shape" --length "$length" --host-memory 100GB --out "$out/restored.jsonl" --commit "$commit"
timeout -k 2 "$(left)" python3 -m lab.filed --shape "$shape" --length "$((length / 4))" --host-memory 100GB --out "$out/filed.jsonl" --commit "$commit"
timeout -k 2 "$(left)" python3 -m lab.small_card --shape "$shape" --lengths "$length" --cards small --host-memory 100GB --steps 12 \
  --contenders kvthaw,offloaded --filled offloaded --out "$out/small_card.jsonl" --commit "$commit"
