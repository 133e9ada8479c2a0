#!/usr/bin/env bash
# Searches of trees on the host after idle workers of the pool are called one by one: by threads, and within steps at 36k. An H200 with 16
# cores, alone, 60 s. usage: search.sh FOLDER COMMIT SECONDS [LENGTH SHAPE LONG]. It needs a native module of this commit.
# Before (5586bcc): icecache-digest .507 ms a layer where its heads took .284 of 16 threads, .477 within steps (27.8 ms a token; goal 15);
# icecache by UVA 67.5 ms a token. LONG: full's second token there, beside icecache's 13.8 s.
# Publish: python -m benchmarks.speed FOLDER after parting all.jsonl as tree.sh does, then the sentences of docs/notes/icecache.md.
set -u
out=$1 commit=$2 most=$3 length=${4:-36864} shape=${5:-llama-3.1-8b} long=${6:-131072}
timeout -k 2 20 python3 -m benchmarks.kernels_tree --length "$length" --layers 2 --threads 1,8,0 --method icecache-digest --commit "$commit" \
  --out "$out/kernels_tree.jsonl"
timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.second_token --shape "$shape" --commit "$commit" --out "$out/all.jsonl" --prompts \
  "icecache-digest:reuse=3/$length@64,icecache-digest/$length@64,icecache:transfer=uva/$length@24,full/$long"
