#!/usr/bin/env bash
# A token at 128k under quantised weights, pariskv-plus, captured, all 32 layers: bf16, torchao's int4 and fp8. About 60 s of an H200.
# Goals: int4 5.0 ms, fp8 5.6 (bf16 6.5 at a6c93a0). Three layers are checked first.
# needs .gpu/quant/torchao-0.18*.whl: python3 -m pip download --no-deps -d .gpu/quant --only-binary=:all: --python-version 3.12 \
#   --platform manylinux_2_28_x86_64 torchao==0.18.0
# usage: quant.sh FOLDER COMMIT SECONDS [WEIGHTS...]; int4-gemlite also needs .gpu/quant/gemlite-0.6*.tar.gz (pip download --no-deps gemlite)
# publish: lines of quantised*.jsonl to lab/results/quantised.jsonl, and their times to docs/gpus.md, Quantised weights.
set -u
out=$1 commit=$2 most=$3 packages=$(mktemp -d)
shift 3
weights=("$@")
(($#)) || weights=(int4 fp8 bf16)
ls .gpu/quant/torchao-*.whl > /dev/null || { echo "torchao's wheel is missing; see this script's head"; exit 1; }
python3 -m zipfile -e .gpu/quant/torchao-*.whl "$packages"
for source in .gpu/quant/gemlite-*.tar.gz; do [ -e "$source" ] && tar -C "$packages" --strip-components 1 -xzf "$source"; done
export PYTHONPATH=$PYTHONPATH:$packages
quantised() { timeout -k 2 $((most - SECONDS - 3)) python3 -m lab.quantised --methods pariskv-plus --ways captured --commit "$commit" "$@"; }
quantised --layers 3 --weights "$(IFS=,; echo "${weights[*]}")" --lengths "" --limit 30 --out "$out/quantised-checked.jsonl"
for one in "${weights[@]}"; do
  quantised --weights "$one" --lengths 131072 --new-tokens 300 --unchecked --limit $((most * 3 / 4)) --out "$out/quantised-$one.jsonl" > "$out/$one.log" 2>&1
done
