#!/usr/bin/env bash
# figures.sh FOLDER COMMIT SECONDS [NAME,NAME]: decode steps behind the figures of docs/results.md and the README (lab/plans.py), in one
# process; alone on a GPU, 300 s or more for a name. What stands in FOLDER/decode.jsonl is not measured again.
# Publish: python3 -m lab.speed FOLDER, then draw: python3 -m lab.figures NAME --draw --out lab/results/decode.jsonl --plot docs
out=$1 commit=$2 most=$3 names=${4:-baseline,icecache,text,throughput,clusterkv-ratio,prkv-latency,pariskv-batches}
timeout -k 3 $((most - 3)) python3 -m lab.figures "$names" --host-bytes 120000000000 --out "$out/decode.jsonl" --commit "$commit" 2>&1 |
  grep --line-buffered -avE 'AUTOTUNE|triton_mm_|SingleProcess|^strides|^dtypes|^  mm ' | cut -c1-400
