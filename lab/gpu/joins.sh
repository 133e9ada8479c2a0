#!/usr/bin/env bash
# Steps that a prompt of 1,000 tokens joins, as most of the trace's do, beside 23 or 47 such sequences with room for 128k, and full attention beside
# 6; 8 layers, 40 s of an H200 each. It must show steps with a prompt (`join_ms`; expected: pariskv-plus 15.5 ms for 20.6, clusterkv-plus 19 for 23.7, full
# 11.1 as before, auto, which attends to everything in blocks, 13), plain ones as before (3.8; auto 2.6), and by function and kernel what is left of them.
out=$1 commit=$2 most=$3
joins() { timeout -k 2 $((most - SECONDS - 2)) python3 -m lab.joins --device-memory 30GiB --commit "$commit" --out "$out/joins.jsonl" "$@"; }
joins --method auto --seqs 28
joins --method pariskv-plus --seqs 24
joins --method clusterkv-plus --seqs 48
joins --method full --seqs 7
