"""Where a prompt that comes in chunks takes longer than one pass: encoding, attention by runs, whole prompts, a profile.

`--parts encode,attention,prompts,profile`, in the order given. encode: 128k keys by shapes of the kernel, the present one first,
each checked against the definition. attention: of a chunk to runs of earlier keys, and to its own, beside one causal pass, in
TFLOP/s; merging. prompts: seconds of each method in one pass and in chunks, whose logits are checked; the second of two. profile:
seconds of the device by kernel, both ways. Of `--layers` layers of the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from kvthaw.bench.decode import free
from kvthaw.engine.hf import PreTrainedModel, attach
from kvthaw.evaluate.machine import now, where
from kvthaw.kernels import dense
from kvthaw.kernels import encode as encoding
from kvthaw.kernels.merge import PARTS, merge_parts
from lab.bench.prefill import PrefillSetting, check, measure
from lab.bench.shapes import build, random_ids
from lab.kernels import DIM, GROUP, HEADS, SHAPE, eager_time, rates
from lab.kernels_pariskv import encode_time
from lab.launches import summary
from lab.script import run_kernels

_SHAPES = ((64, 4, 3), (64, 4, 2), (128, 8, 3), (64, 8, 3))
"""Keys per block, warps and stages of the encoding kernel."""
_CHUNK = 16384


def lines(*, quick: bool, parts: str, tokens: int, layers: int, methods: str, chunk: int) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    model: PreTrainedModel | None = None
    for part in parts.split(","):
        torch.cuda.empty_cache()
        if part == "encode":
            yield from encodings(tokens, _SHAPES[:1] if quick else _SHAPES)
        elif part == "attention":
            yield from attention(tokens, chunk)
        else:
            with torch.inference_mode(False):  # as a program has its model
                model = model or build("llama-3.1-8b", where()[0], layers=layers)
                for method in methods.split(",") if part == "prompts" else ():
                    yield prompts(model, method, tokens, chunk, layers)
                for size in (tokens, chunk) if part == "profile" else ():
                    yield profiled(model, methods.split(",")[0], tokens, size)


def encodings(tokens: int, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[dict[str, Any]]:
    """The encoding kernel by its shapes."""
    for shape in shapes:
        encoding.BLOCK, encoding.WARPS, encoding.STAGES = shape
        yield encode_time(tokens) | dict(zip(("block", "warps", "stages"), shape, strict=True))
        torch.cuda.empty_cache()


def attention(tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Attention of a chunk's queries to one run of earlier keys after another, and merging."""
    scale = DIM**-0.5
    query = torch.randn(1, HEADS * GROUP, chunk, DIM, device="cuda", dtype=torch.bfloat16)
    for run in (size for size in (16384, 32768, 65536, 131072) if size <= tokens):
        rows = torch.randn(1, HEADS, run, 2, DIM, device="cuda", dtype=torch.bfloat16)
        keys, values = rows[:, :, :, 0], rows[:, :, :, 1]

        seconds = eager_time(partial(dense.attend, query, keys, values, scale=scale, causal=False), 3)
        yield flops("attention to a run", seconds, chunk * run) | {"queries": chunk, "run": run}
    own = torch.randn(2, 1, HEADS, chunk, DIM, device="cuda", dtype=torch.bfloat16)
    seconds = eager_time(partial(dense.attend, query, own[0], own[1], scale=scale, causal=True), 3)
    yield flops("attention of a chunk to its own", seconds, chunk * chunk // 2) | {"queries": chunk}
    out = dense.attend(query, own[0], own[1], scale=scale, causal=True)
    for count in range(2, PARTS + 1):
        moved = (count + 1) * out[0].nbytes
        seconds = eager_time(partial(merge_parts, [out] * count, torch.bfloat16), 5)
        yield {"op": "merge", "parts": count, "queries": chunk, **rates(seconds, moved)}
    del query, own, out
    whole = torch.randn(1, HEADS * GROUP + 2 * HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = whole.split((HEADS * GROUP, HEADS, HEADS), dim=1)
    seconds = eager_time(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True), 2)
    yield flops("attention in one pass", seconds, tokens * tokens // 2) | {"queries": tokens}


def flops(op: str, seconds: float, pairs: int) -> dict[str, Any]:
    """A line of attention over so many pairs of a query and a key."""
    tera = 4 * HEADS * GROUP * DIM * pairs / seconds / 1e12
    return {"op": op, "ms": round(seconds * 1e3, 3), "tflops": round(tera, 1)}


def prompts(model: PreTrainedModel, method: str, tokens: int, chunk: int, layers: int) -> dict[str, Any]:
    """One pass, chunks, and their ratio, index building included."""
    found = {}
    for size in (tokens, chunk):
        limits = (None, 100) if method.startswith("pariskv") else (1024, None)
        how: dict[str, Any] = {"device": "", "dense_layers": 0, "layers": layers, "budget": limits[0], "retrieved": limits[1]}
        one = PrefillSetting(shape="", method=method, length=tokens, chunk=size, **how)
        if size == chunk:
            check(model, one, None)
        found[size] = measure(model, one, None)
    line = {"op": "prompt", "method": method, "tokens": tokens, "chunk": chunk, "layers": layers}
    for name, timed in (("one_pass", found[tokens]), ("chunks", found[chunk])):
        line |= {
            f"{name}_s": timed["seconds"],
            f"{name}_indexed_s": timed["indexed_s"],
            f"{name}_bytes": timed["peak_device_bytes"],
        }
    return line | {"ratio": round(found[chunk]["indexed_s"] / found[tokens]["indexed_s"], 4)}


@torch.no_grad()
def profiled(model: PreTrainedModel, method: str, tokens: int, chunk: int) -> dict[str, Any]:
    """The device's seconds by kernel and part, of the second prompt."""
    ids = random_ids(model, 1, tokens, seed=tokens)
    limits: dict[str, Any] = {"retrieved": 100} if method.startswith("pariskv") else {"budget": 1024}

    def prompt() -> float:
        free()
        with attach(model, method, prefill_chunk=chunk, dense_layers=0, **limits) as handle:
            begin = now(ids.device)
            model(ids, logits_to_keep=1)
            handle.cache.wait()
            return now(ids.device) - begin

    prompt()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds = prompt()
    events = [(e.name, e.time_range.elapsed_us()) for e in seen.events() or () if e.device_type.name == "CUDA"]
    found = summary(events, 1)
    line = {"op": "profile", "method": method, "tokens": tokens, "chunk": chunk, "seconds": seconds}
    return line | {**found, "kernels": found["kernels"][:20]}


if __name__ == "__main__":
    run_kernels(
        __doc__, lines, SHAPE, parts="encode,attention,prompts,profile", tokens=1 << 17, layers=8, methods="pariskv-plus",
        chunk=_CHUNK,
    )  # fmt: skip
