#!/usr/bin/env bash
# Steps that a prompt of 1,000 tokens joins, as most of the trace's do, beside 47 or 23 such sequences with room for 128k, and full attention beside
# 6; 8 layers, some 60 s of an H200. It must show why a step with a prompt takes 10 and 14 ms more than a plain one does beyond full's 10 (auto and
# clusterkv-plus), and plain steps in buckets of lengths (expected: 2.5 to 3 ms for 4.5 and 5.5; full 2.3).
out=$1 commit=$2 most=$3
joins() { timeout -k 2 $((most - SECONDS - 2)) python3 -m benchmarks.joins --device-memory 30GiB --commit "$commit" --out "$out/joins.jsonl" "$@"; }
joins --method auto --seqs 24
joins --method clusterkv-plus --seqs 48
joins --method full --seqs 7
