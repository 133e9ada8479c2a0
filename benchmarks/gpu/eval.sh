#!/usr/bin/env bash
# What the accuracy tables of docs/results.md lack. Nothing is timed: it may run beside other parts that are not timed.
# usage: benchmarks/gpu/eval.sh OUT COMMIT SECONDS [PROCESSES]    4 processes; 340 s of an H100 that other parts share
# In order of worth; what stands in OUT is not run again:
#   table   ClusterKV with its paper's 256 and 1,024 tokens of clusters (goals: 95.3 and 98.6 % of full attention) and MagicPIG's own draw, on
#           the samples of benchmarks/results/compare.jsonl. Publish: python3 -m benchmarks.compared OUT/table benchmarks/results/compare.jsonl (full attention stays the published)
#   pairs   claims of a point on seeds that compare.jsonl does not have: prkv's single needles and icecache's pass keys (goal: as full
#           attention, 224 pairs each), icecache and others at 256 tokens (goal: 99 %, 448 pairs, icecache 1,568)
#   TEXT    other haystacks: each .gpu/eval/TEXT.txt, 100 kB of a text that models/train.py has not seen, such as RULER's PaulGrahamEssays.json.
#           Tables of both: python3 -m benchmarks.claims OUT/pairs OUT/TEXT...
#   drift   icecache, magicpig and pqcache over 4,096 tokens at two more places of the book; append OUT/drift.jsonl to benchmarks/results/
set -uo pipefail
out=$1 commit=$2 end=$((SECONDS + $3 - 5)) many=${4:-4}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$out/table"
echo "$commit" > "$out/commit"
seven=passkey,niah_single,niah_multikey,niah_multikey_uuid,longeval,kv_retrieval,variable_tracking
at256=icecache:budget=256,pariskv:budget=256,clusterkv:budget=256,prkv:budget=256,icecache-digest:budget=256,pariskv-plus:budget=256
at256+=,clusterkv-plus:budget=256,prkv-plus:budget=256
rows=pariskv:retrieved=100,clusterkv:retrieved=256,clusterkv:retrieved=1024,prkv:retrieved=256
baselines=quest:budget=256,arkvale:budget=256,pqcache:budget=256,shadowkv:budget=256,socket:budget=256,retroinfer:budget=256
baselines+=,infinigen:budget=256,snapkv:budget=256,twilight:budget=256
every() { # WHAT COMMAND...: its shards side by side, in the time that is left
  local what=$1 begin=$SECONDS i running=()
  shift
  for i in $(seq "$many"); do
    ((end - SECONDS > 15)) || { echo "no time left: $what"; return; }
    timeout -k 3 $((end - SECONDS)) python3 -m kvthaw "$@" --length 4096,16384 --dense-layers 0 --shard "$i/$many" > /dev/null || echo "not all: $what" &
    running+=($!)
  done
  wait "${running[@]}"
  echo "$what: $((SECONDS - begin)) s"
}
compare() { every "$1, $2" compare --out "$out/$1" --task "$2" --samples "$3" --seed "$4" --method "full,$5" "${@:6}"; }

for seed in 1 2; do # one process beside the others: a run takes a minute or more
  for method in icecache:retrieved=100 magicpig:retrieved=0.5 pqcache:retrieved=100; do
    ((end - SECONDS > 40)) || continue
    timeout -k 3 $((end - SECONDS)) python3 -m benchmarks.recall drift --method $method --length 8192 --steps 4096 --probe 32 --seed $seed \
      >> "$out/drift.jsonl" || echo "no drift of $method at $seed"
  done
done &

# sample i of compare.jsonl stands i twentieths deep, less every fifth; a job takes every eleventh of sixteen depths
depths=0,15,35,55,75,90,10,30,50,65,85,5,25,40,60,80
for method in clusterkv:retrieved=256,clusterkv:retrieved=1024 magicpig:budget=0.5; do
  every "table, $method" eval $seven --out "$out/table/results.jsonl" --samples 16 --seed 1000 --depths $depths --probe 0 --method $method
done
compare pairs niah_single 112 1016 prkv:retrieved=256
compare pairs passkey 112 1016 icecache:budget=64
texts=$(ls .gpu/eval/*.txt 2> /dev/null) || echo "no haystacks: .gpu/eval has no text" >&2
for methods in $at256,$rows $baselines; do
  for text in $texts; do
    compare "$(basename "$text" .txt)" passkey,variable_tracking,niah_multikey,niah_multikey_uuid 16 1200 $methods --text "$text"
  done
  [ $methods = $baselines ] || compare pairs $seven 32 1016 icecache:budget=256,clusterkv-plus:budget=256,pariskv-plus:budget=256,icecache-digest:budget=256,socket:budget=256,retroinfer:budget=256
done
compare pairs $seven 112 1016 icecache:budget=256
wait
wc -l "$out"/*.jsonl "$out"/*/results.jsonl
