#!/usr/bin/env bash
# Searches of trees on the host in pieces (keys' scores apart from the way down): by threads, beside which cores the system shows, and within
# steps at 36k. An H200 with 16 cores, alone, 60 s. usage: search.sh FOLDER COMMIT SECONDS [LENGTH SHAPE]. It needs a native module of
# this commit.
# Before (a6020a2, two query heads a thread, one piece): 2.80 ms a layer on one thread, .74 on 8, .49 on 16; within steps .506, of which
# threads work .32 and the longest .43; median 26.1 ms a token (goal 15), with reuse=3 14.7 (goal 8).
# Publish: python -m lab.speed FOLDER after parting all.jsonl as tree.sh does, then the sentences of docs/notes/icecache.md.
set -u
out=$1 commit=$2 most=$3 length=${4:-36864} shape=${5:-llama-3.1-8b}
lscpu -e > "$out/cores.txt" 2>&1
timeout -k 2 15 python3 -m lab.kernels_tree --length "$length" --layers 2 --threads 1,8,0 --method icecache-digest --commit "$commit" \
  --out "$out/kernels_tree.jsonl"
timeout -k 2 $((most - SECONDS - 18)) python3 -m lab.second_token --shape "$shape" --commit "$commit" --out "$out/all.jsonl" --prompts \
  "icecache-digest/$length@64,icecache-digest:reuse=3/$length@64"
for few in 0,2,4,6,8,10,12,14 0-7; do  # of which one may be a hyperthread of each core
  timeout -k 2 12 taskset -c "$few" python3 -m lab.kernels_tree --length "$length" --layers 1 --threads 8 --method icecache-digest \
    --commit "$commit" --out "$out/cores_$few.jsonl"
done
