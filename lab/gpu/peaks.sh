#!/usr/bin/env bash
# Peak tokens a second: batches that fill an H200, all layers of the 8B shape, full attention beside indexes in one run, those not measured
# yet first; 25 s a batch. Goals, of full's peak: 32k 2.5, with rows of 8 bits 3.5; 128k 3.2 and 4.5. Single sequences of 128k and 512k:
# auto at most 1.05 of the best fixed method. Other GPUs: CELLS=...
# Publish: python3 -m lab.speed OUT/peaks, then the sentences of docs/notes/placement.md.
set -u
out=$1 commit=$2 most=$3
cells=full/7x131072,clusterkv-plus/7x131072,clusterkv-plus/6x131072,auto/1x524288,clusterkv-plus/1x524288,pariskv-plus/1x524288
cells+=,auto/1x131072,clusterkv-plus/1x131072,pariskv-plus/1x131072,full/1x131072,full/28x32768,clusterkv-plus/24x32768,clusterkv-plus/fp8/44x32768,clusterkv-plus/fp8/11x131072
timeout $((most - SECONDS - 3)) python3 -m lab.peaks --cells "${CELLS:-$cells}" --commit "$commit" --out "$out/peaks.jsonl" 2> "$out/peaks.err"
tail -n 20 "$out/peaks.err" | cut -c1-300
