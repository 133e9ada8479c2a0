#!/usr/bin/env bash
# Prompts through the first 12 layers of a Gemma 3 4B shape, of which ten attend to a window of 1,024: kvthaw in chunks of 16k, the same with
# one mask of a chunk as before, and transformers in one pass. Alone on a GPU, 45 s; no goal but that kvthaw's time grows with the length.
# usage: windows.sh FOLDER COMMIT SECONDS
# publish: lines of windows.jsonl to lab/results/windows.jsonl, and their times to docs/notes/prefill.md, Layers of a window.
out=$1 commit=$2 most=$3
ask() {
  timeout -k 2 $((most - SECONDS - 2)) python3 -m lab.windows --commit "$commit" --out "$out/windows.jsonl" "$@"
}
ask --lengths 16384,32768
((most - SECONDS > 10)) && ask --lengths 131072 --ways kvthaw,whole --runs 1
