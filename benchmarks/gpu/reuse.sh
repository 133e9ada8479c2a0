#!/usr/bin/env bash
# reuse.sh FOLDER COMMIT SECONDS: prompts that begin like earlier ones, again and again in four processes, 120 s beside other work. It must show
# no test that fails: pariskv's once had another third token (78ffdf2, docs/notes/gpu-tests.md), in one of three device memories. FOLDER: what failed.
set -u
out=$1 most=$3
round=0
while ((SECONDS < most - 20)); do
  round=$((round + 1))
  timeout -k 3 $((most - SECONDS - 3)) python3 -m pytest -c pyproject.toml --rootdir . -m gpu -p no:benchmark -q -n 4 --maxfail 100 \
    tests/engine/test_prefix.py -k reuse_on_a_gpu > "$out/log.$round" 2>&1 || grep -E "^E  |^FAILED" "$out/log.$round"
done
echo "$round rounds"
