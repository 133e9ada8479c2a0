#!/usr/bin/env bash
# flash4.sh: unpack FlashAttention 4 from .gpu/flash4.tar.xz, once, and print the folders for PYTHONPATH; print nothing if it is not there.
# The archive has what `pip download 'flash-attn-4[cu13]>=4.0.0b36'` brings and the machine lacks, each wheel unpacked.
site=${TMPDIR:-/tmp}/flash4-site
if [ ! -e "$site/.whole" ] && [ -e .gpu/flash4.tar.xz ]; then mkdir -p "$site" && tar -C "$site" -xJf .gpu/flash4.tar.xz && touch "$site/.whole"; fi
if [ -e "$site/.whole" ]; then printf %s "$site:$site/nvidia_cutlass_dsl/dsl_packages"; fi
