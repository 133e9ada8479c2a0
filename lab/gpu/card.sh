#!/usr/bin/env bash
# card.sh FOLDER COMMIT SECONDS: what to expect of this card: what its memory and its bus move, then captured steps of the 8B shape at 36k and
# 128k under full attention, pariskv-plus (100 rows), clusterkv-plus and prkv-plus (budget 1,024, 70 % of the rows on the device). Alone on the
# machine; 210 s. Publish with `python -m lab.speed FOLDER`: each GPU has a table of its own. It
# has to agree with docs/planning.md within 10 %, or the card's constants in src/kvthaw/bench/gpus.py need another fit.
set -u
out=$1 commit=$2 most=$3 shape=${4:-llama-3.1-8b} shrink=${5:-1} steps=${6:-captured}
nvidia-smi --query-gpu=name,memory.total,pcie.link.gen.current,pcie.link.width.current,power.limit --format=csv,noheader
timeout -k 3 40 python3 -m lab.bandwidth --out "$out/bandwidth.jsonl" --commit "$commit"
timeout -k 3 $((most - SECONDS - 2)) python3 -m lab.figures length --methods full,pariskv-plus,clusterkv-plus,prkv-plus --shape "$shape" \
  --shrink "$shrink" --steps "$steps" --host-bytes 60000000000 --out "$out/decode.jsonl" --commit "$commit" 2>&1 |
  grep --line-buffered -avE 'AUTOTUNE|triton_mm_|SingleProcess|^strides|^dtypes|^  mm ' | cut -c1-400
