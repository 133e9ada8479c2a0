#!/usr/bin/env bash
# fuzz.sh FOLDER COMMIT SECONDS [FIRST SEED]: random sequences of operations on caches and batches, captured, in 2 processes; 200 s or more beside
# other work. Give a seed that docs/notes/gpu-tests.md does not name. Goal: none fails but for choices at a last bit, which it tells apart.
set -u
out=$1 most=$3 first=${4:-7300000} device=${5:-cuda}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for i in 0 1; do
  from=$((first + 1000 * i))
  timeout -k 3 $((most - 3)) python3 lab/fuzz.py --device "$device" --seeds $from:$((from + 1000)) --seconds $((most > 60 ? most - 45 : most / 2)) \
    --no-shrink > "$out/fuzz$i.log" 2>&1 &
done
wait
tail -n 2 "$out"/fuzz*.log | cut -c1-600
