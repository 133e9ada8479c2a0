#!/usr/bin/env bash
# vLLM beside kvthaw on one GPU; goals: docs/notes/prefill.md and docs/notes/serving.md.
# usage: beside.sh FOLDER COMMIT SECONDS [OPTIONS of lab.beside_vllm...]; alone on the machine; without options the check, the first
# token and decoding, 350 s on an H100. The requests are `--parts short,trace --rates 4,0 --requests 100`, 350 s.
# .gpu/vllm.tar.xz: vLLM for the machine's Python and torch with what the machine lacks of its dependencies, for one PYTHONPATH.
# .gpu/quant/torchao-*.whl, if it is there: for --precision fp8, as quant.sh says.
# .gpu/flash4.tar.xz, if it is there: flash-attn-4 with its dependencies, for kvthaw.
# .gpu/AzureLLMInferenceTrace_conv.csv: https://github.com/Azure/AzurePublicDataset.
# Publish: append beside_vllm.jsonl to lab/results/beside_vllm.jsonl, and the table to the notes.
set -u
out=$1 commit=$2 most=$3 site=${TMPDIR:-/tmp}/vllm-site
shift 3
[ $# -gt 0 ] || set -- --parts check,first,decode
[ -e .gpu/vllm.tar.xz ] || { echo ".gpu/vllm.tar.xz is missing"; exit 1; }
if [ ! -e "$site/.whole" ]; then
  mkdir -p "$site"
  python3 -c "import sys, tarfile; tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2])" .gpu/vllm.tar.xz "$site" || exit 1
  if ! python3 -c "import numba" 2> /dev/null; then # vLLM's n-gram speculator, which nothing here uses, imports these names
    mkdir -p "$site/numba"
    cat > "$site/numba/__init__.py" << 'P'
__version__ = "0"
def jit(*given, **how):
    return given[0] if len(given) == 1 and callable(given[0]) and not how else (lambda function: function)
njit, prange = jit, range
def get_num_threads():
    return 1
def set_num_threads(count):
    pass
P
  fi
  touch "$site/.whole"
fi
own=$(bash "$(dirname "$0")/flash4.sh")
for wheel in .gpu/quant/torchao-*.whl; do [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$site-torchao" && own=$own:$site-torchao; done
echo "unpacked after $SECONDS s"
exec timeout -k 5 $((most - SECONDS - 3)) python3 -m lab.beside_vllm --vllm-path "$site" --kvthaw-path "$own" --trace .gpu/AzureLLMInferenceTrace_conv.csv \
  --seconds $((most - SECONDS - 10)) --commit "$commit" --logs "$out" --out "$out/beside_vllm.jsonl" "$@"
