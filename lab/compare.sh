#!/usr/bin/env bash
# All methods on the same work, on a machine with a GPU: lab/compare.sh OUT [MINUTES [PROCESSES [SEED]]]
# Resumable: what stands in OUT is not run again. The large table comes first; what is left of MINUTES (8) is for the other parts, side by side.
# PROCESSES (8) share the GPU, best under NVIDIA's MPS; each holds up to 5 GiB of prompts, as much for indexes, and as much pinned on the host.
# SEED (1000): samples from there on; kvthaw's own methods were designed on 0 to 49.
# Afterwards, on any machine with matplotlib: python -m lab compare --report-only --out OUT; python3 -m lab.compared OUT publishes it.
set -euo pipefail
out=$1 minutes=${2:-8} jobs=${3:-8} seed=${4:-1000}
end=$(( $(date +%s) + $(awk -v m="$minutes" 'BEGIN { print int(60 * m) }') ))
run() { # by so many processes, in the time that is left
  local many=$1 left i; shift
  left=$(( end - $(date +%s) ))
  if (( left < 20 )); then echo "no time left for: $*" >&2; return; fi
  for i in $(seq "$many"); do
    timeout -s INT "$left" python3 -m lab compare --shard "$i/$many" --out "$out" --samples 50 --seed "$seed" "$@" || echo "not all of: $*" >&2 &
  done
  wait $(jobs -p)
}
does=passkey,niah_single,niah_multikey,niah_multikey_uuid,longeval,kv_retrieval,variable_tracking  # what the shipped model can
few=$(( jobs > 6 ? jobs / 6 : 1 ))
mkdir -p "$(dirname "$out")"
papers=icecache,pariskv,clusterkv,prkv
ours=icecache-digest,icecache-digest-device,pariskv-plus,clusterkv-plus,prkv-plus
others=full,oracle,streaming,h2o,snapkv,arkvale,quest,pqcache,magicpig,omnikv,freekv,twilight,shadowkv,retroinfer,infinigen,socket
settings=icecache:preset=code:budget=256,clusterkv:preset=code:budget=256,quest:page=32:budget=256
rows=pariskv:retrieved=100,pariskv-plus:retrieved=100,prkv:retrieved=256,prkv-plus:retrieved=256
rows+=,clusterkv:retrieved=256,clusterkv:retrieved=1024,magicpig:budget=0.5  # as their papers count
for samples in 16 32 48; do # each whole for every task, length and method before it grows: only that is published
  run "$jobs" --samples $samples --task $does --length 4096,16384 --budget 64,128,256,1024 --method $papers,$ours,$others,$settings,$rows
done
run "$jobs" --task $does,perplexity --length 8192,32768 --method $papers,$ours,$others
run "$few" --task passkey --length 65536 &
run $(( 2 * few )) --task $does --length 4096,32768 --dense-layers 2 --method icecache-digest,icecache-digest:reuse=3,pariskv,pariskv-plus,clusterkv,clusterkv-plus,prkv,omnikv &
run "$few" --task niah_multikey,kv_retrieval --length 8192 --samples 8 --probe 8 &
run "$few" --task $does --length 8192 --question sparse --budget 256 &
wait
# RULER's answers may have 128 tokens, and a method that has lost its way uses them all: some two minutes of 12 processes a length. Of its 13 tasks
# the shipped model can do nine, of BABILong's none: these say that there is nothing to keep.
for length in 4096 8192; do run "$jobs" --task ruler --length $length --budget 256; done
run "$jobs" --task babilong --length 4096 --budget 256 --samples 8
