#!/usr/bin/env bash
# prepare.sh PYTHON: make what run.sh needs on a GPU machine without a network, in .gpu/, which git should ignore. It takes a minute.
# PYTHON: an interpreter of that machine's version, such as python3.12. Packages are those that a machine with torch, transformers, triton,
# numpy, pytest and their dependencies lacks, in the versions of constraints.txt; the module is kvthaw's own, for x86-64.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "$1") work=$(mktemp -d)
export PATH="$PWD/.venv/bin:$PATH"
trap 'rm -rf "$work"' EXIT
mkdir -p .gpu "$work/wheels" "$work/packages" "$work/build"
names='fastapi|starlette|pydantic|pydantic_core|annotated-types|annotated-doc|typing-inspection|uvicorn|httptools|xgrammar|apache-tvm-ffi'
names+='|gguf|openai|httpx2|httpcore2|truststore|jiter|sniffio|math-verify|latex2sympy2_extended|antlr4-python3-runtime'
names+='|opentelemetry-api|typer'
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
platforms=()
for kind in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${kind}_x86_64"); done
mapfile -t wanted < <(grep -E "^($names)==" constraints.txt)
pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp "${platforms[@]}" \
  --dest "$work/wheels" "${wanted[@]}"
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/packages"; done
tar -C "$work/packages" -cJf .gpu/packages.tar.xz .
"$python" -m venv "$work/env" && "$work/env/bin/pip" install --quiet "$(grep '^nanobind==' constraints.txt)"
cmake -S . -B "$work/build" -G Ninja -DPython_EXECUTABLE="$work/env/bin/python" -DCMAKE_BUILD_TYPE=Release > "$work/log"
cmake --build "$work/build" >> "$work/log"
cp "$work"/build/_native.*.so .gpu/
ls -l .gpu
