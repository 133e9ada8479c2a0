#!/usr/bin/env bash
# auto beside full attention and the fixed methods, one sequence of 8k to 128k, 8 of 32 layers, captured: seconds to the first token, index
# included (join_s), and milliseconds a token. Some 45 s of an H200. Goals: at 8k and 32k 1.02 of full's token and 1.05 of its first one;
# anywhere at most 1.05 of the best fixed method. Lengths come twice where kernels compile in the first of them.
# publish: lines of placement.jsonl to lab/results/placement.jsonl, the crossings printed at the end to kvthaw.methods.auto, where
# an H200's are an H100's by its memory's bandwidth until then.
out=$1 commit=$2 most=$3
timeout -k 2 $((most - 2)) python3 -m lab.placement --sizes 1x8192,1x32768,1x8192,1x32768,1x49152,1x65536,1x131072 --steps 160 \
  --method full,auto,thaw,pariskv-plus --device-memory auto --commit "$commit" --out "$out/placement.jsonl"
