#!/usr/bin/env bash
# 200 requests of Azure's conversation trace at once (47,000 tokens of output), 8 layers of the 8B shape; 170 s on an H200. Goals, output
# tokens a second of full's in the same scheduler: 2.5 where full must queue: requests of up to 128k and 30 GiB for KV, a quarter of an
# H200's for a quarter of the layers, which are 7 places of full and 48 of clusterkv-plus; auto attends to everything, with KV in blocks, and would have
# 30 places if its index followed (pariskv-plus, .94 GiB each); auto 1.0 where all fits (16 places of 8k), each twice: the first method of a process is slower. A line says what steps with a prompt and others took, and until when the latter were on the device.
# .gpu/AzureLLMInferenceTrace_conv.csv: https://github.com/Azure/AzurePublicDataset; the first 221 lines are enough.
# Publish: python3 -m lab.speed OUT/trace, then the sentences of docs/notes/serving.md.
trace=.gpu/AzureLLMInferenceTrace_conv.csv
[ -e $trace ] || { echo "$trace is missing"; exit 1; }
replay() { timeout $((most - SECONDS)) python3 -m lab.trace --trace $trace --requests 200 --speed 0 --layers 8 --unchecked \
  --commit "$commit" --out "$out/trace.jsonl" "$@"; }
out=$1 commit=$2 most=$3
replay --method auto,full,clusterkv-plus --seqs 48,7,48 --capacity 131072 --device-memory 30GiB
replay --method full,auto,full,auto --seqs 16 --capacity 8192 --device-memory auto
