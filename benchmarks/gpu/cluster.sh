#!/usr/bin/env bash
# pariskv-plus's candidates, estimates and rows in one launch, a cluster of blocks a KV head, beside the three launches: rows compared, then
# us a layer at 36k to 1M, alone, within select and within all launches of a layer. Alone on an H200, 65 s, tests in the last 15.
# usage: cluster.sh FOLDER COMMIT SECONDS
# Expected (docs/notes/decode-path.md): choice 5 to 7 us at 36k for 13.3. publish: lines to benchmarks/results/kernels_rows.jsonl, then that note.
out=$1 commit=$2 most=$3
timeout -k 2 $((most - SECONDS - 17)) python3 -m benchmarks.kernels_rows --commit "$commit" --out "$out/kernels_rows.jsonl"
timeout -k 2 $((most - SECONDS - 2)) python3 -m pytest -c pyproject.toml --rootdir . -p no:benchmark -q tests/kernels/rows_in_cluster.py > "$out/tests.log" 2>&1
