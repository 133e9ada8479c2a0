#!/usr/bin/env bash
# IceCache with its tree on the host, on an H200 with 16 cores and 128 GB: ways to bring rows, side by side, at 36k and 128k; the second
# token behind prompts in chunks; where a step's time goes; searches by threads; times at 150k to 300k (the paper's figure 8). Alone, 150 s.
# usage: tree.sh FOLDER COMMIT SECONDS [LENGTH LENGTH FIGURE SHAPE SHAPE LAYERS]: to try it, small ones. It needs a native module of this commit.
# Goals: second token at most 1.3 of full's at both lengths (1.33 and 1.22, waiting for all trees first). A token of icecache-digest 15 ms at
# 36k (29.8) and 22 at 128k (48.1).
# Each line is written as it is measured. /LAYERS: so many layers, 2 of them dense; 0x: drawn keys, no prompt. host.txt says what the
# cores are: with two threads a core the floor of docs/notes/icecache.md, reckoned for 16 cores, is too low.
# Killed before its end it leaves all.jsonl; the line with grep parts it. Publish: python -m lab.speed
# FOLDER, then the sentences of docs/results.md, docs/notes/icecache.md and prefill.md.
set -u
out=$1 commit=$2 most=$3 short=${4:-36864} long=${5:-131072} far=${6:-150000} shape=${7:-llama-3.1-8b} other=${8:-qwen3-4b} few=${9:-11}
{ lscpu; grep . /sys/kernel/mm/transparent_hugepage/{enabled,defrag}; free -g; } > "$out/host.txt"
ice() { # SHAPE SECONDS PROMPTS
  timeout -k 2 "$2" python3 -m lab.second_token --shape "$1" --prompts "$3" --commit "$commit" --out "$out/all.jsonl"
}
timeout -k 2 25 python3 -m lab.kernels_tree --length "$short" --layers 2 --threads 1,8,0 --method icecache-digest --commit "$commit" \
  --out "$out/kernels_tree.jsonl"
prompts=2xfull/$short,3xicecache/$short@16,icecache-digest/$short@64,icecache:transfer=uva/$short@24,icecache-copies:layout=page/$short@16
prompts+=,icecache/$long@8,icecache:transfer=uva/$long/$few@16,icecache-copies:layout=page/$long/$few@16,icecache/$long/$few@16
prompts+=,0xicecache-digest/$long/$few@48,full/$long
ice "$shape" $((most - SECONDS - 45)) "$prompts"
prompts=
for length in $far $((far * 2)) $((far * 4 / 3)) $((far * 5 / 3)); do
  prompts+=,0xfull/$length/$few@16,0xicecache-reuse/$length/$few@8,0xicecache/$length/$few@8
done
ice "$other" $((most - SECONDS - 2)) "${prompts#,},0xhf-offloaded/$far/$few@2"
grep '"bench": "prefill"' "$out/all.jsonl" > "$out/trees.jsonl"
