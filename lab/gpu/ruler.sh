#!/usr/bin/env bash
# RULER's needles on a pretrained model, 8k and 16k, 256 tokens: a prefill serves all methods. 128 samples of eight methods take 100 s on an H200.
# usage: ruler.sh FOLDER COMMIT SECONDS [PROCESSES [MODEL [SAMPLES [METHODS [TASKS]]]]]    nothing is timed; it may run beside parts that are not timed
# MODEL: .gpu/real/qwen25-coder.gguf unless given; .gpu/real/essays.txt is RULER's haystack. .gpu/packages.tar.xz must hold gguf and accelerate.
# Publish: python3 -m lab.needles FOLDER/ruler --name MODEL --gpu GPU --commit COMMIT
set -u
out=$1 most=$3 many=${4:-7} model=${5:-.gpu/real/qwen25-coder.gguf} samples=${6:-8}
methods=${7:-full,oracle,thaw,pariskv-plus,thaw:tolerance=0,icecache-digest-device,retroinfer,quest}
tasks=${8:-single_1,single_2,single_3,multikey_1,multikey_2,multikey_3,multivalue,multiquery}
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$out/ruler"
for ((i = 1; i <= many; i++)); do
  timeout -k 3 $((most - 5)) python3 -m lab compare --model "$model" --task "ruler_niah_${tasks//,/,ruler_niah_}" --samples "$samples" \
    --length 8192,16384 --method "$methods" --budget 256 --batch 8 --chat --seed 4100 --shard "$i/$many" --text .gpu/real/essays.txt \
    --out "$out/ruler" > "$out/ruler$i.log" 2>&1 &
done
wait
tail -qn 1 "$out"/ruler*.log | cut -c1-200
wc -l "$out/ruler/results.jsonl"
