#!/usr/bin/env bash
# The launches of a layer's retrieval before and after a change of kernels, then compiled steps after it.
# usage: micro.sh FOLDER COMMIT SECONDS; an H200, alone on it, 150 s: what there is no time left for is left out.
# Needs .gpu/micro/after.tar.xz, kvthaw and its tests after the change:
#   git archive AFTER src/kvthaw tests pyproject.toml | tar --delete src/kvthaw/assets | xz > after.tar.xz
# What it must show: chain.after less than chain.before for every method and length, choice.us_at_once less than us_in_chunks, eight_bits
# below 83 us at 128k; steps below 5.79 / 6.58 / 8.88 / 11.55 ms (pariskv-plus), 7.07 / 7.20 (clusterkv-plus), 7.34 / 7.53 (prkv).
set -u
folder=$1 commit=$2 end=$((SECONDS + $3 - 4))
[ -e .gpu/micro/after.tar.xz ] || { echo ".gpu/micro/after.tar.xz is missing; this script says how it is made"; exit 1; }
after=$(mktemp -d)
tar -C "$after" -xJf .gpu/micro/after.tar.xz
cp src/kvthaw/native/_native.*.so "$after/src/kvthaw/native/"
then_() { PYTHONPATH=$after/src:$PWD:$after/tests:$PYTHONPATH timeout -k 3 "$@"; }  # SECONDS COMMAND: with the change
left() { echo $((end - SECONDS < $1 ? end - SECONDS : $1)); }
(cd "$after" && then_ "$(left 40)" python3 -m pytest -q -p no:cacheprovider tests/kernels/test_flash_decode.py -k "gpu and (beside or captured or scales) or scales") 2>&1 | tail -n 5
timeout -k 3 "$(left 45)" python3 -m benchmarks.kernels_chain --out "$folder/chain.before.jsonl" --commit "$commit"
then_ "$(left 60)" python3 -m benchmarks.kernels_chain --out "$folder/chain.after.jsonl" --commit "$commit with the change"
most=$(left 600) clusters=clusterkv-plus:budget=1024:hits=0.7 pages=prkv:budget=1024:hits=0.7 paris=pariskv-plus:retrieved=100
then_ "$most" python3 -m benchmarks.timings --out "$folder" --commit "$commit with the change" --seconds $((most - 3)) --jobs \
  "steps $paris 128 512,steps $clusters 128 320,steps $paris 36 512,steps $paris 1024 512,steps $paris:kv_dtype=fp8 1024 512,\
steps $paris:kv_dtype=fp8 512 512,steps $paris:kv_dtype=fp8 128 512,steps $clusters 36 320,steps $pages 128 512,steps $pages 36 512,\
steps $paris 512 512,steps $paris:kv_dtype=fp8 36 512,steps clusterkv-plus:iterations=4:budget=1024:hits=0.7 512 320"
