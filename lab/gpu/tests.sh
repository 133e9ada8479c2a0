#!/usr/bin/env bash
# tests.sh FOLDER COMMIT SECONDS: all tests that need a GPU, in 16 processes a GPU; then the failed ones again, in processes of their own, to tell
# which fail alone too. Two GPUs also run the tests of both (two.log). 816 take 300 s on one H200 with 16 cores, 185 s on two; ask for 60 s more.
# FOLDER: told.jsonl and again.jsonl (a line a test, as it ends), junit.xml, failed.txt, and what pytest printed. Goal: none failed.
set -u
gpus=$(nvidia-smi -L | wc -l)
out=$1 most=$3 n=${4:-$((16 * gpus))}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
flash4=$(bash "$(dirname "$0")/flash4.sh") # its tests are skipped without it
export PYTHONPATH=$PYTHONPATH${flash4:+:$flash4} PYTHONFAULTHANDLER=1
run() { # SECONDS FILE PYTEST'S OPTIONS
  local seconds=$1 told=$2; shift 2
  timeout -k 3 -s INT "$seconds" python3 -m pytest -c pyproject.toml --rootdir . -m gpu -p no:benchmark -p gpu_run --told="$told" --gpus "$gpus" -rfE --no-header --timeout-method thread --dist load "$@"
}
: > "$out/told.jsonl"
two=tests/engine/test_tensor_parallel.py
if ((gpus > 1)); then timeout -k 3 $((most - 10)) python3 -m pytest -c pyproject.toml --rootdir . -m gpu -p no:benchmark -q --timeout 400 --tb short --durations 4 $two > "$out/two.log" 2>&1 & fi
run $((most > 90 ? most - 45 : most - 10)) "$out/told.jsonl" -n "$n" --maxschedchunk 2 --timeout 200 --tb short --durations 25 --junitxml="$out/junit.xml" > "$out/pytest.log" 2>&1
echo "exit status $? after $SECONDS s"; tail -n 1 "$out/pytest.log"
python3 - "$out" << 'P'
import collections, json, pathlib, sys
out = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in (out / "told.jsonl").read_text().splitlines()]
print(dict(collections.Counter(line["outcome"] for line in lines)))
failed = dict.fromkeys(line["test"] for line in lines if line["outcome"] == "failed")
(out / "failed.txt").write_text("".join(f"{name}\n" for name in list(failed)[:24]))
P
failed=()
mapfile -t failed < "$out/failed.txt"
left=$((most - SECONDS - 4))
if ((${#failed[@]} && left > 15)); then
  run "$left" "$out/again.jsonl" -n 8 --maxschedchunk 1 --timeout 60 --tb long "${failed[@]}" 2>&1 | head -c 900000 > "$out/again.log"
  tail -n 1 "$out/again.log"
fi
wait
if ((gpus > 1)); then tail -n 1 "$out/two.log"; fi
