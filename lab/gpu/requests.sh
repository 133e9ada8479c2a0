#!/usr/bin/env bash
# requests.sh FOLDER COMMIT SECONDS [DEVICE [REQUESTS [FIRST SEED]]]: 1,000 random requests on the GPU, over all methods, in 3 processes; 300 s
# beside other work. Give a seed that docs/notes/gpu-tests.md does not name. Goals: every request that ends by itself equals itself alone, memory
# is as it was, nothing waits for ever. FOLDER: a line a method.
set -u
out=$1 most=$3 device=${4:-cuda} count=${5:-1000} first=${6:-93000}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for i in 0 1 2; do
  mine=$(python3 -c "import kvthaw; print(','.join(list(kvthaw.METHODS)[$i::3]))")
  timeout -k 3 $((most - 3)) python3 -m lab.requests --device "$device" --requests $(((count + 2) / 3)) --methods "$mine" --seed "$((first + i))" \
    > "$out/requests$i.jsonl" 2> "$out/errors$i" &
done
wait
cut -c1-400 "$out"/requests*.jsonl; tail -n 3 "$out"/errors*
