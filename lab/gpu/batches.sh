#!/usr/bin/env bash
# Select, attention and fetch of 4, 16 and 64 sequences of 8k, 32k and 128k, each beside what its bytes take at 4.3 TB/s (fetch 55 GB/s).
# First attention to all rows of whole blocks, of sequences of one length and of ragged ones.
# usage: batches.sh FOLDER COMMIT SECONDS; alone on an H200, 75 s: lines come as they are measured, what there is no time for is left out.
# Goal: near their floors, which means that us / floor_us does not grow from 4 to 64 sequences.
# Publish: append kernels_batches.jsonl to lab/results/kernels_batches.jsonl, then a table in docs/notes/gpu-kernels.md.
exec timeout -k 3 $(($3 - 3)) python3 -m lab.kernels_batches --out "$1/kernels_batches.jsonl" --commit "$2"
