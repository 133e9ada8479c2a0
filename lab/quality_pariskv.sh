#!/usr/bin/env bash
# What ParisKV finds, on the shipped model, on a machine with a GPU and no network: tasks, recall, drift. Many processes side by side,
# each bound by its launches; what stands in OUT is not run again.
# usage: lab/quality_pariskv.sh OUT COMMIT [PROCESSES [full|tiny]]   then: python3 lab/tables.py OUT/quality_pariskv.jsonl
set -uo pipefail
[ $# -ge 2 ] || { sed -n 4p "$0" >&2; exit 2; }
mkdir -p "$1/parts" && out=$(cd "$1" && pwd) || exit 1
commit=$2 processes=${3:-12} size=${4:-full}
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
python3 -m lab --help > /dev/null || { echo "python3 -m lab does not run here" >&2; exit 1; }

paper=pariskv
grid=$paper:rho=0.05:beta=0.05,$paper:rho=0.2:beta=0.05,$paper:rho=0.5:beta=0.05,$paper:rho=0.1:beta=0.1,$paper:rho=0.2:beta=0.1
grid+=,$paper:rho=0.5:beta=0.1,$paper:rho=0.2:beta=0.2,$paper:rho=0.3:beta=0.2,$paper:rho=0.5:beta=0.2,$paper:rho=0.3:beta=0.3,$paper:rho=0.5:beta=0.3
votes=$paper:votes=binary,pariskv-plus-ablated:votes=tiered,pariskv-plus:centre=False
for beta in 0.05 0.1 0.125 0.15 0.2; do votes+=,pariskv-plus:beta=$beta; done
policies=pariskv-plus:policy=mean_query,pariskv:preset=code
plain=$paper-ablated:rotate=False,$paper-ablated:centroids=learned,$paper-ablated:centroids=learned:rotate=False
plain+=,$paper-ablated:centroids=learned:normalise=False,$paper-ablated:centroids=learned:rotate=False:normalise=False
recall=pariskv-plus,$paper,$grid,$votes,$policies,$plain
drift=pariskv,pariskv-plus,pariskv-ablated:centroids=learned
if [ "$size" = tiny ]; then
  lengths=(1024) tasks=(passkey niah_single) seeds=(0) places=(0 1) recall_lengths=(1024) steps=4 after=(16) prompt=1024
  samples=1 probe=4
else
  lengths=(65536 32768 16384 4096) tasks=(niah_multikey_uuid niah_multikey niah_single passkey) seeds=(0 1 2 3 4 5 6 7) places=(0 1 2)
  recall_lengths=(32768 8192) steps=16 after=(8192 4096) prompt=8192 samples=20 probe=32
fi

# A line a process: its name, then what python -m lab eval is given. The longest come first.
jobs() {
  local n length seed task
  for n in "${after[@]}"; do
    for seed in "${places[@]}"; do
      for method in ${drift//,/ }; do
        echo "drift-$n-$seed-${method//[:=]/_} drift --method $method --length $prompt --steps $n --probe $probe --seed $seed"
      done
    done
  done
  for length in "${recall_lengths[@]}"; do
    for seed in "${seeds[@]}"; do
      echo "recall-$length-$seed recall --method $recall --retrieved 100 --length $length --steps $steps --probe 4 --seed $seed"
    done
  done
  for length in "${lengths[@]}"; do
    for task in "${tasks[@]}"; do
      [ "$length" = 65536 ] && n=$((samples / 2)) || n=$samples
      echo "task-$task-$length $task --method full,oracle,pariskv,pariskv-plus --retrieved 100 --length $length --samples $n --probe 0"
    done
  done
}

# Together: the same settings over all shards, which are read and not run; one line a method, with its plot.
together() {
  local n length
  for n in "${after[@]}"; do
    echo "all-drift-$n drift --method $drift --length $prompt --steps $n --probe $probe --samples ${#places[@]} --plot $out/drift_$n.png"
  done
  for length in "${recall_lengths[@]}"; do
    echo "all-recall-$length recall --method $recall --retrieved 100 --length $length --steps $steps --probe 4 --samples ${#seeds[@]}"
  done
}

source lab/side_by_side.sh
status=0
side_by_side "$out" "$processes" || status=1
cat "$out"/parts/task-*.done "$out"/parts/all-*.done | python3 lab/tables.py --gather "$commit" > "$out/quality_pariskv.jsonl"
echo "$out/quality_pariskv.jsonl: $(wc -l < "$out/quality_pariskv.jsonl") lines, $SECONDS s in all"
exit $status
