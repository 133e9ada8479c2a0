#!/usr/bin/env bash
# Searches of trees on the host with the query heads of a tree together: by threads, and within steps at 36k. An H200 with 16 cores,
# alone, 40 s. usage: search.sh FOLDER COMMIT SECONDS [LENGTH SHAPE]. It needs a native module of this commit.
# Before (dd38131, each query head alone): 3.18 ms a layer on one thread, .61 on 8; within steps .506, 28.5 ms a token (median 26.4; goal
# 15), with reuse=3 15.0 (goal 8).
# Publish: python -m benchmarks.speed FOLDER after parting all.jsonl as tree.sh does, then the sentences of docs/notes/icecache.md.
set -u
out=$1 commit=$2 most=$3 length=${4:-36864} shape=${5:-llama-3.1-8b}
timeout -k 2 20 python3 -m benchmarks.kernels_tree --length "$length" --layers 2 --threads 1,8,0 --method icecache-digest --commit "$commit" \
  --out "$out/kernels_tree.jsonl"
timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.second_token --shape "$shape" --commit "$commit" --out "$out/all.jsonl" --prompts \
  "icecache-digest/$length@64,icecache-digest:reuse=3/$length@64"
