#!/usr/bin/env bash
# What ClusterKV, PRKV, Quest and ArkVale find, on the shipped model, on a machine with a GPU and no network: tasks, recall by distance
# and number of clusters, PRKV by static share, interval and window. Many processes side by side, each bound by its launches; what
# stands in OUT is not run again.
# usage: lab/quality_pages.sh OUT COMMIT [PROCESSES [full|tiny]]
set -uo pipefail
[ $# -ge 2 ] || { sed -n 5p "$0" >&2; exit 2; }
mkdir -p "$1/parts" && out=$(cd "$1" && pwd) || exit 1
commit=$2 processes=${3:-12} size=${4:-full}
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
python3 -m lab --help > /dev/null || { echo "python3 -m lab does not run here" >&2; exit 1; }

found=full,oracle,clusterkv,clusterkv-plus,prkv,prkv:page=8,quest,arkvale
clusters=$(for distance in cosine l2 inner; do for c in 200 400 600 800; do printf ',clusterkv:distance=%s:clusters=%s' $distance $c; done; done)
recall=oracle,prkv,quest,arkvale${clusters}
shares=prkv:share=0.0,prkv:share=0.25,prkv:share=0.5,prkv:share=0.75,prkv:share=1.0,prkv:share=auto,arkvale,oracle
ablation=prkv,prkv:interval=32,prkv:interval=64,prkv:interval=256,prkv:window=16,prkv:window=32,prkv:window=128
if [ "$size" = tiny ]; then
  lengths=(1024) tasks=(passkey niah_multikey_uuid) samples=1 budgets=256 recall_length=1024 recall_budgets=256 recall_seeds=(0) steps=4
  prompt=600 after=40 probe=8 rows=(64) drift_seeds=(0) share_lengths=600,1024 share_rows=64,128
else
  lengths=(32768 16384 4096) tasks=(niah_multikey_uuid niah_multikey niah_single passkey_book passkey) samples=20 budgets=256,1024
  recall_length=32768 recall_budgets=256,512,1024,2048 recall_seeds=(0 1 2 3 4 5 6 7) steps=16
  prompt=8192 after=2048 probe=32 rows=(256 1024) drift_seeds=(0 1) share_lengths=4096,16384,32768 share_rows=256,512,1024,2048
fi
drift="drift --length $prompt --steps $after --probe $probe"

# A line a process: its name, then what python -m lab eval is given. The longest come first.
jobs() {
  local k seed method length task
  for k in "${rows[@]}"; do
    for seed in "${drift_seeds[@]}"; do
      echo "share-$k-$seed $drift --follow full --method $shares --retrieved $k --seed $seed"
    done
  done
  for length in "${lengths[@]}"; do
    for task in "${tasks[@]}"; do
      echo "task-$task-$length $task --method $found --budget $budgets --length $length --samples $samples --probe 0"
    done
  done
  for seed in "${recall_seeds[@]}"; do
    echo "recall-$seed recall --method $recall --budget $recall_budgets --length $recall_length --steps $steps --probe 4 --seed $seed"
  done
  for seed in "${drift_seeds[@]}"; do
    for method in ${ablation//,/ }; do
      echo "ablation-$seed-$method $drift --method $method --retrieved ${rows[0]} --seed $seed"
    done
  done
  echo "task-keep niah_multikey_uuid --method clusterkv:keep=0,clusterkv:keep=1,clusterkv:keep=2 --length ${lengths[0]}" \
    "--budget $budgets --samples $samples --probe 0"
}

# Together: the same settings over all shards, which are read and not run; one line a method, with its plot.
together() {
  local k n=${#drift_seeds[@]}
  for k in "${rows[@]}"; do
    echo "all-share-$k $drift --follow full --method $shares --retrieved $k --samples $n --plot $out/prkv_share_$k.png"
  done
  echo "all-recall recall --method $recall --budget $recall_budgets --length $recall_length --steps $steps --probe 4" \
    "--samples ${#recall_seeds[@]} --plot $out/clusters.png"
  echo "all-ablation $drift --method $ablation --retrieved ${rows[0]} --samples $n --plot $out/prkv_ablation.png"
}

source lab/side_by_side.sh
status=0
side_by_side "$out" "$processes" || status=1
python3 -m lab.shares --length "$share_lengths" --rows "$share_rows" --samples 4 --out "$out/parts/static.jsonl" > "$out/parts/static.done" || status=1
cat "$out"/parts/{task-*,all-*,static}.done | python3 lab/tables.py --gather "$commit" > "$out/quality_pages.jsonl"
echo "$out/quality_pages.jsonl: $(wc -l < "$out/quality_pages.jsonl") lines, $SECONDS s in all"
exit $status
