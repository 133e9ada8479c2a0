#!/usr/bin/env bash
# prefixes.sh FOLDER COMMIT SECONDS [FIRST SEED]: 16,000 random requests that begin alike, with prefix caches, in 16 processes on one GPU, which so is far
# behind its hosts; not timed in this form. Goal: every request has the tokens that it has alone. FOLDER: a line a process.
set -u
out=$1 most=$3 first=${4:-94000}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for i in $(seq 0 15); do
  timeout -k 3 $((most - 3)) python3 -m lab.shared_prefixes --device cuda --requests 1000 --seed "$((first + i))" > "$out/prefixes$i.jsonl" 2> "$out/errors$i" &
done
wait
cat "$out"/prefixes*.jsonl
tail -n 3 "$out"/errors*
