#!/usr/bin/env bash
# A prompt of 128k joins seven sequences of 8k that decode, KV on the host, all 32 layers of the 8B shape; 80 s of an H200. Goals: the others'
# 99th percentile between two tokens at most .4 s, a short request's first token within 1 s, the long one's at most 1.25 times as late as alone.
# What it must show: of the longest steps none with `lock` but those of the first chunks, the last chunk's (1,536 tokens) with a launch_ms like
# the others'. Where a step is still longer than .4 s: lock_ms says that it page-locked itself, wait_ms that it waited for the device.
# page_locking_ms: at_work far over idle, with no work_left, says that page-locking waits for the device, longest_launch that others' launches wait too.
# publish: lines of joining.jsonl to lab/results/joining.jsonl, and their times to docs/notes/serving.md.
timeout -k 2 $(($3 - 2)) python3 -m lab.joining --method pariskv-plus --layers 32 --host-memory 100GiB --unchecked --commit "$2" --out "$1/joining.jsonl"
