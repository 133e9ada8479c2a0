#!/usr/bin/env bash
# Steps that a prompt of 1,000 tokens joins, as most of the trace's do, beside 47 or 23 such sequences with room for 128k, and full attention beside
# 6; 8 layers, 40 s of an H200 each. It must show plain steps (expected: auto 3.6 ms for 4.3, clusterkv-plus 3.7 for 5.5, full 2.3) and steps with a
# prompt (18 for 24, 21 for 30, 10 for 12.6), and by function and kernel what is left of them.
out=$1 commit=$2 most=$3
joins() { timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.joins --device-memory 30GiB --commit "$commit" --out "$out/joins.jsonl" "$@"; }
joins --method clusterkv-plus --seqs 48
joins --method full --seqs 7
joins --method auto --seqs 24
