#!/usr/bin/env bash
# All methods on the same work, on a machine with a GPU: benchmarks/compare.sh OUT [MINUTES [PROCESSES]]
# Resumable: what stands in OUT is not run again. MINUTES (8) are shared out in the order of importance; the parts that come late get what is left.
# PROCESSES (8): launches of that many fill the GPU; each holds up to 5 GiB of prompts, as much for indexes, and as much pinned on the host.
# Afterwards, on any machine with matplotlib: kvthaw compare --report only --out OUT (or OUT/cells.jsonl).
set -euo pipefail
out=$1 minutes=${2:-8} jobs=${3:-8}
end=$(( $(date +%s) + $(awk -v m="$minutes" 'BEGIN { print int(60 * m) }') ))
run() { # at most this many minutes, and no more than are left
  local most=$1 left; shift
  left=$(( end - $(date +%s) ))
  if (( left < 20 )); then echo "no time left for: $*" >&2; return; fi
  left=$(awk -v l="$left" -v m="$most" 'BEGIN { l /= 60; print (l < m) ? l : m }')
  python3 -m kvthaw compare --jobs "$jobs" --minutes "$left" --report never --out "$out" "$@" || echo "not all of: $*" >&2
}
does=passkey,niah_single,niah_multikey,niah_multikey_uuid,longeval,kv_retrieval,variable_tracking  # what the shipped model can
mkdir -p "$(dirname "$out")"
run 9 --task $does,perplexity --lengths 4096,8192,16384,32768 --samples 50
run 1 --task passkey --lengths 65536 --samples 50
run 2 --task $does --lengths 4096,32768 --samples 50 --dense-layers 2 --methods icecache,icecache-reuse,pariskv,clusterkv,prkv,omnikv
run 1 --task niah_multikey,kv_retrieval --lengths 8192 --samples 8 --probe 8
run 2 --task $does --lengths 8192 --samples 50 --protocol sparse --budgets 256
run 9 --task ruler --lengths 4096 --samples 50 --budgets 256
