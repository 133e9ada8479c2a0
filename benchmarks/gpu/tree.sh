#!/usr/bin/env bash
# IceCache's trees on the host: searches and appends a layer, then behind attach() the second token of 36k and 128k in chunks and the
# captured steps after it, all 32 layers. Alone on an H200 with 16 cores, 130 s; the important lines first.
# usage: tree.sh FOLDER COMMIT SECONDS [SHAPE LENGTH LENGTH]
# Goals: second token at most 1.3 of full's at both lengths (in one pass 36k was 1.10; in chunks, the first of which is the short one, reckoned 1.2); seconds +
# index_alone_s is the serial way beside (figure 5a). A token of icecache-digest 15 ms at 36k and 22 at 128k (31.5 and 60 before), with
# reuse=3 8 and 11 (13.7 and 24); a search growing with less than n^.35 (.49).
# Killed before its end it leaves all.jsonl; the two lines with grep part it.
# Publish: python -m benchmarks.speed FOLDER, then the sentences of docs/results.md, docs/notes/icecache.md and prefill.md.
set -u
out=$1 commit=$2 most=$3 shape=${4:-llama-3.1-8b} short=${5:-36864} long=${6:-131072}
prompts=2xfull/$short,2xicecache/$short,2xicecache-digest/$short@64,icecache-digest:reuse=3/$short@96,icecache-digest:reuse=3/$long@96
prompts+=,icecache-digest/$long@48,icecache/$long,full/$long,icecache:transfer=uva/$short@16
searches() { # LENGTH LAYERS
  timeout -k 2 20 python3 -m benchmarks.kernels_tree --length "$1" --layers "$2" --method icecache-digest --commit "$commit" --out "$out/kernels_tree.jsonl"
}
searches "$short" 8
timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.second_token --shape "$shape" --prompts "$prompts" --commit "$commit" --out "$out/all.jsonl"
grep '"bench": "prefill"' "$out/all.jsonl" > "$out/trees.jsonl"
grep '"bench": "decode"' "$out/all.jsonl" > "$out/decode.jsonl"
((most - SECONDS > 22)) && searches "$long" 4
