#!/usr/bin/env bash
# What the accuracy tables of docs/notes/shipped-model.md lack. Nothing is timed: it may run beside other parts that are not timed.
# usage: lab/gpu/eval.sh OUT COMMIT SECONDS [PROCESSES [LENGTHS]]    4 processes of up to 8 GB; 450 s beside other parts
# In order of worth; what stands in OUT is not run again:
#   pairs   claims of a point on seeds that compare.jsonl does not have: icecache at 256 tokens (goal: 99 % of full attention, 672 pairs,
#           1,344 at the end)
#   TEXT    other haystacks: each .gpu/eval/TEXT.txt, 100 kB of a text that models/train.py has not seen, such as RULER's PaulGrahamEssays.json;
#           needles first, which compare_essay.jsonl lacks at 16k, the baselines last. Print: python3 -m lab.claims OUT/*/
#   drift   pqcache, magicpig and icecache over 4,096 tokens at two more places of the book; append OUT/drift.jsonl to lab/results/
# Publish: add the cells of OUT/pairs to lab/results/compare_seeds.jsonl and those of a text to compare_TEXT.jsonl (`lab.cells`), then
# python3 -m lab.compared lab/results/compare.jsonl, whose claims count the further seeds.
set -uo pipefail
renice -n 19 $$ > /dev/null # parts beside it come first
out=$1 commit=$2 end=$((SECONDS + $3 - 5)) many=${4:-4} lengths=${5:-4096,16384}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$out"
echo "$commit" > "$out/commit"
seven=passkey,niah_single,niah_multikey,niah_multikey_uuid,longeval,kv_retrieval,variable_tracking
at256=icecache:budget=256,pariskv:budget=256,clusterkv:budget=256,prkv:budget=256,icecache-digest:budget=256,pariskv-plus:budget=256
at256+=,clusterkv-plus:budget=256,prkv-plus:budget=256
rows=pariskv:retrieved=100,clusterkv:retrieved=256,clusterkv:retrieved=1024,prkv:retrieved=256
baselines=quest:budget=256,arkvale:budget=256,pqcache:budget=256,shadowkv:budget=256,socket:budget=256,retroinfer:budget=256
baselines+=,infinigen:budget=256,snapkv:budget=256,twilight:budget=256,magicpig:budget=0.5
compare() { # FOLDER TASKS SAMPLES SEED METHODS [OPTIONS]: its shards side by side, in the time that is left
  local what="$1, $2 of $3" begin=$SECONDS i running=()
  for i in $(seq "$many"); do
    ((end - SECONDS > 15)) || { echo "no time left: $what"; return; }
    timeout -k 3 $((end - SECONDS)) python3 -m lab compare --out "$out/$1" --task "$2" --samples "$3" --seed "$4" --method "full,$5" \
      --length "$lengths" --dense-layers 0 --batch 16 --shard "$i/$many" "${@:6}" > /dev/null || echo "not all: $what" &
    running+=($!)
  done
  wait "${running[@]}"
  echo "$what: $((SECONDS - begin)) s"
}

for one in pqcache:retrieved=100/1 pqcache:retrieved=100/2 magicpig:retrieved=0.5/1 icecache:retrieved=100/2 magicpig:retrieved=0.5/2; do
  ((end - SECONDS > 40)) || continue # one process beside the others: a run takes minutes
  timeout -k 3 $((end - SECONDS)) python3 -m lab.recall drift --method "${one%/*}" --length 8192 --steps 4096 --probe 32 --seed "${one#*/}" \
    >> "$out/drift.jsonl" || echo "no drift of $one"
done &

compare pairs $seven 48 1016 icecache:budget=256
texts=$(ls .gpu/eval/*.txt 2> /dev/null) || echo "no haystacks: .gpu/eval has no text" >&2
haystacks() { # TASKS METHODS
  for text in $texts; do
    compare "$(basename "$text" .txt)" "$1" 16 1200 "$2" --text "$text"
  done
}
haystacks niah_multikey,niah_multikey_uuid $at256,$rows
compare pairs $seven 96 1016 icecache:budget=256
haystacks passkey,variable_tracking $at256,$rows
haystacks passkey,variable_tracking,niah_multikey,niah_multikey_uuid $baselines
wait
wc -l "$out"/*.jsonl "$out"/*/results.jsonl
