#!/usr/bin/env bash
# What selections become of over 8,192 generated tokens, on the shipped model: a process a method, side by side; what stands in OUT is not run again.
# usage: lab/drift.sh OUT COMMIT [PROCESSES [full|tiny]]   then append OUT/drift.jsonl to lab/results/drift.jsonl; docs/drift_8192.png
set -uo pipefail
[ $# -ge 2 ] || { sed -n 3p "$0" >&2; exit 2; }
mkdir -p "$1/parts" && out=$(cd "$1" && pwd) || exit 1
commit=$2 processes=${3:-7} size=${4:-full}
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

given="--length 8192 --steps 8192 --probe 64"
[ "$size" = tiny ] && given="--length 1024 --steps 32 --probe 4"
learned=pariskv,pariskv-plus,pariskv-ablated:centroids=learned,icecache,pqcache,magicpig budgeted=icecache-digest,pariskv,pariskv-plus,clusterkv,clusterkv-plus,prkv,quest

# A line a process: its name, then what python -m lab eval is given. The slowest come first.
jobs() {
  local method
  for method in ${budgeted//,/ }; do echo "drift-256-$method drift $given --method $method --budget 256"; done
  for method in ${learned//,/ }; do echo "drift-100-${method//[:=]/_} drift $given --method $method --retrieved 100"; done
}

# Together: the same settings over all shards, which are read and not run; one line a method, with its plot.
together() {
  echo "all-drift-256 drift $given --method $budgeted --budget 256 --plot $out/drift_budget.png"
  echo "all-drift-100 drift $given --method $learned --retrieved 100 --plot $out/drift_8192.png"
}

source lab/side_by_side.sh
status=0
side_by_side "$out" "$processes" || status=1
cat "$out"/parts/all-*.done | python3 lab/tables.py --gather "$commit" > "$out/drift.jsonl"
echo "$out/drift.jsonl: $(wc -l < "$out/drift.jsonl") lines, $SECONDS s in all"
exit $status
