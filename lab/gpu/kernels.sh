#!/usr/bin/env bash
# kernels.sh FOLDER COMMIT SECONDS: kernels of the methods, each checked against its definition and timed as replays of a graph, then what
# indexing takes of a prompt of 32k. Alone on a GPU; some 30 to 60 s each, what there is no time left for is left out. ParisKV's and those of
# batches come with speed.sh, searches of trees on the host with tree.sh.
# Publish: append FOLDER/*.jsonl to the files of their names in lab/results/, then the sentences of docs/notes.
out=$1 commit=$2 most=$3
for one in kernels_decode kernels_pages kernels_transfer indexing kernels_nodes kernels_barrier; do
  ((most - SECONDS > 15)) || { echo "no time left: $one"; continue; }
  timeout -k 2 $((most - SECONDS - 2)) python3 -m "lab.$one" --out "$out/$one.jsonl" --commit "$commit" || echo "not all: $one"
done
