#!/usr/bin/env bash
# The launches of a layer's retrieval in one graph, then captured steps of one sequence.
# usage: micro.sh FOLDER COMMIT SECONDS; an H200, alone on it, 170 s: what there is no time left for is left out.
# What it must show: a layer's launches no slower than in lab/results/kernels_chain.jsonl, choice.at_once_us less than in_chunks_us;
# steps below 6.02 / 6.46 / 8.88 / 11.67 ms (pariskv-plus at 36k / 128k / 512k / 1M),
# 6.47 / 6.96 (clusterkv-plus), 7.34 / 7.38 (prkv).
set -u
folder=$1 commit=$2 end=$((SECONDS + $3 - 4))
timeout -k 3 60 python3 -m lab.kernels_chain --out "$folder/kernels_chain.jsonl" --commit "$commit"
most=$((end - SECONDS)) clusters=clusterkv-plus:budget=1024:hits=0.7 pages=prkv:budget=1024:hits=0.7 paris=pariskv-plus:retrieved=100
exec timeout -k 3 "$most" python3 -m lab.timings --out "$folder" --commit "$commit" --seconds $((most - 3)) --jobs \
  "steps $paris 128 512,steps $clusters 128 320,steps $paris 36 512,steps $clusters 36 320,steps $paris 1024 512,\
steps $paris:kv_dtype=fp8 1024 512,steps $paris:kv_dtype=fp8 128 512,steps $pages 128 512,rival pariskv-plus-fp8 1024 512,\
steps $paris 512 512,steps $paris:kv_dtype=fp8 512 512,rival pariskv-plus-fp8 512 512,steps $pages 36 512,rival full 512 200,\
rival full-fp8 512 200,steps clusterkv-plus:iterations=4:budget=1024:hits=0.7 512 320"
