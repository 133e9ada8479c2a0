"""Prompts of a Gemma 3: five of six layers attend to a window.

usage: python -m lab.windows [--shape 4b] [--layers 12] [--lengths 16384,...] [--chunk 16384] [--ways kvthaw,...] [--out F]

A JSON line for each length and way: seconds to the prompt's logits, the CPU's own (cpu_s), and the most bytes of the device. On a
CPU these are what the process had more than ever before, so there each line takes a process of its own.

Ways: kvthaw, full attention under attach in chunks; whole, the same with one mask for all queries of a chunk, as transformers makes
it; transformers, in one pass.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionMaskInterface, PreTrainedModel

from kvthaw.bench.decode import free
from kvthaw.engine.hf import attach
from kvthaw.engine.hf.layer import NAME
from kvthaw.engine.hf.masks import padding_mask
from kvthaw.engine.hf.model import build, make_config
from kvthaw.evaluate.machine import now, where
from lab.bench.shapes import random_ids
from lab.script import Report, options, run_as_script

SIZES = {"4b": (2560, 10240, 8, 4, 256, 1024), "tiny": (256, 512, 4, 1, 64, 512)}
"""Widths of the model, query heads, KV heads, dimensions of a head, window."""


def model_of(shape: str, layers: int) -> PreTrainedModel:
    """Return a model of random weights."""
    hidden, inner, heads, kv, dim, window = SIZES[shape]
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    config = make_config(
        "gemma3_text", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, sliding_window=window, layer_types=kinds, max_position_embeddings=1 << 20,
    )  # fmt: skip
    device, _ = where()
    return build(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)


@contextmanager
def way(model: PreTrainedModel, name: str, chunk: int) -> Iterator[None]:
    """Have a model take prompts in a way within it."""
    with nullcontext() if name == "transformers" else attach(model, "full", prefill_chunk=chunk):
        if name == "whole":
            AttentionMaskInterface.register(NAME, lambda **how: padding_mask(**how | {"allow_is_causal_skip": False}))
        try:
            yield
        finally:
            AttentionMaskInterface.register(NAME, padding_mask)


def take(model: PreTrainedModel, length: int, runs: int) -> dict[str, Any]:
    """Take in a prompt some times, of which the last counts."""
    ids, cuda = random_ids(model, 1, length, seed=length), model.device.type == "cuda"
    try:
        for _ in range(runs):
            free()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            held, cpu, begin = peak(), time.process_time(), now(model.device)
            with torch.no_grad():
                model(ids, logits_to_keep=1, use_cache=True)
            found = {"seconds": now(model.device) - begin, "cpu_s": time.process_time() - cpu}
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak() - held}


def peak() -> int:
    """Return the most bytes that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """See the module."""
    given = options(
        __doc__, shape="4b", layers=12, lengths="16384,32768", chunk=16384, ways="kvthaw,whole,transformers", runs=2, out=Path,
        commit=str,
    )  # fmt: skip
    report, model = Report(given.out, given.commit), model_of(given.shape, given.layers)
    for length in map(int, given.lengths.split(",")):
        for name in given.ways.split(","):
            with way(model, name, given.chunk):
                found = take(model, length, given.runs)
            setting = {"shape": f"gemma-3-{given.shape}", "layers": given.layers, "length": length, "way": name}
            report.record(setting | {"chunk": None if name == "transformers" else given.chunk}, {"bench": "windows", **found})


if __name__ == "__main__":
    run_as_script(main)
