#!/usr/bin/env bash
# Captured steps before and after: 826b0dc, where every layer counted its own tokens, and this commit, in turns.
# usage: ab.sh FOLDER COMMIT SECONDS; alone on a GPU, 130 s. Goals: after at most 1.01 of before; the host's time of a step of 24 sequences
# (host_median_ms) at most .3 ms. Lines: FOLDER/versions.jsonl, to be appended to lab/results/versions.jsonl.
# Needs .gpu/ab/before.tar.xz, kvthaw as it was, with a native module for the machine's Python. In a folder of its own, here with 3.12:
#   git -C REPOSITORY archive 826b0dc src CMakeLists.txt | tar -x
#   cmake -S . -B build -DPython_EXECUTABLE=$(command -v python3.12) && cmake --build build    # which has nanobind
#   mv build/_native.*.so src/kvthaw/native/ && rm -r src/kvthaw/assets && tar -C src -cJf before.tar.xz kvthaw
[ -e .gpu/ab/before.tar.xz ] || { echo ".gpu/ab/before.tar.xz is missing; this script says how it is made"; exit 1; }
before=$(mktemp -d) && tar -C "$before" -xJf .gpu/ab/before.tar.xz
exec timeout -k 3 $(($3 - 3)) python3 -m lab.versions "$before" "$PWD/src" "$1/versions.jsonl" 36k host 128k eight kernels
