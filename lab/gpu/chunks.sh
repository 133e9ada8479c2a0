#!/usr/bin/env bash
# Chunks of a prompt that joins seven sequences of 8k, KV on the host, 16 layers of the 8B shape; 55 s of an H200 (all 32 took 36 s until the
# batch was warm). It must show what the longest steps of joining.sh did: lines of the last ten chunks of 128k and the steps that index it (goal:
# none over 200 ms, 400 with 32 layers); of chunks of 2,048, 2,560 and 4,096 tokens behind 32k, 64k and 120k others, with and without the
# seven; of one chunk under the profiler, whose busy_ms tell whether the bus and the kernels work beside each other.
timeout -k 2 $(($3 - 2)) python3 -m lab.chunks --layers 16 --host-memory 100GiB --commit "$2" --out "$1/chunks.jsonl"
