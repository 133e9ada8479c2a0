"""Time batches whose blocks lie on the host, on the device, or on both; every sequence and layer has rows of its own.

`python -m lab.placement --out placement.jsonl`: 24 sequences of 32k tokens on eight layers of the 8B shape. With `--check`
each method is first checked on short prompts, under a device memory so small that blocks spill and come back while it decodes: its
tokens must be those with all blocks on the device. Then each placement is timed and its tokens are compared again, but those of
rows read in their blocks with those of rows in the pool, whose roundings differ. A line is one placement of one method:
milliseconds a step until the tokens are on the host, bytes by place, and bytes a step over the bus.

`--device-memory`: separated by commas; none: all blocks on the host. `--kv-dtype fp8`: rows of 8 bits; bytes by place, over the
bus and moved are those of such rows.

`--sizes 1x8192,1x131072,24x4096,24x32768`: other batches. Where a method was timed at several lengths beside full attention, it
prints from how many tokens a sequence on it is the faster, as the table of `kvthaw.methods.auto` has it.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvthaw import Batch
from kvthaw.cache.choice import UvaGather
from kvthaw.cache.index_api import Method
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import noted
from kvthaw.formatting import read_bytes
from kvthaw.methods import resolve
from lab.bench.shapes import build
from lab.script import Report, options

SIZES: dict[str, dict[str, Any]] = {
    "full": {},
    "clusterkv-plus": {"budget": 1024},
    "pariskv": {"retrieved": 100},
    "pariskv-plus": {"retrieved": 100},
    "thaw": {"retrieved": 100},
    "icecache-digest-device": {"budget": 1024},
    "auto": {"retrieved": 100},
}
PLACED = {"none": None, "copied": "auto"}
"""device_memory of placements that go by another name; copied: rows are copied from their blocks to the pool."""
WARM = 24


def decode(
    model: PreTrainedModel,
    method: str,
    prompts: torch.Tensor,
    steps: int,
    memory: int | str | None,
    sizes: dict[str, Any],
    *,
    prompted: Callable[[PreTrainedModel], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Decode `steps` tokens after each prompt [B, T], which the model takes within prompted(model). Returns the tokens and what was
    measured after the first WARM of them."""
    room: dict[str, Any] = {} if method == "full" else {"device_memory": PLACED.get(str(memory), memory)}
    given: str | Method = replace(resolve(method), transfer=UvaGather) if memory == "copied" else method
    how: dict[str, Any] = {"max_seqs": len(prompts), "capacity": prompts.shape[1] + steps + 1}
    batch = Batch(model, given, dense_layers=0, **how, **sizes, **room)
    begin = time.perf_counter()
    requests = [batch.join(prompt, max_new_tokens=steps + 1, stop=[]) for prompt in prompts]
    with prompted(model):
        for request in requests:
            batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()
    _wait()
    joined, gaps = time.perf_counter() - begin, list[float]()
    before = batch.stats()
    for step in range(steps - 1):  # the last token ends the requests, and with them what stats() tells
        if step == WARM:
            before = batch.stats()
        begin = time.perf_counter()
        batch.step()
        gaps.append(time.perf_counter() - begin)
    after, timed = batch.stats(), sorted(gaps[WARM:] or gaps)
    found = {
        "join_s": joined,
        "mean_ms": 1e3 * statistics.mean(timed),
        "median_ms": 1e3 * statistics.median(timed),
        "p95_ms": 1e3 * timed[int(0.95 * len(timed))],
        "max_ms": 1e3 * timed[-1],
        "tokens_per_s": len(prompts) / statistics.mean(timed),
        "method_in_force": after.method,
        "captures": after.captures,
        "hit_rate": after.hit_rate,
        "device_rate": after.device_rate,
        "kv_device_bytes": after.kv_device_bytes + after.kv_dense_bytes,
        "device_block_bytes": after.device_block_bytes,
        "kv_host_bytes": after.kv_host_bytes,
        "fixed_bytes": sum(batch.cache.kv.streams.device.fixed.values()),
        "fetched_bytes": (after.fetched_bytes - before.fetched_bytes) / len(timed),
        "moved_bytes": (after.moved_bytes - before.moved_bytes) / len(timed),
    }
    tokens = [list(request.tokens) for request in requests]
    batch.cache.reset()
    del batch, requests
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return tokens, found


def check(
    model: PreTrainedModel, method: str, sizes: dict[str, Any], length: int = 1024, steps: int = 200, block_size: int = 64
) -> None:
    """Exit with an error if a method's tokens depend on where its blocks lie. Blocks are small, so that many of them move."""
    prompts, small = random_prompts(model, 3, length), {**sizes, "block_size": block_size}
    expected, _ = decode(model, method, prompts, steps, None, small)
    whole, all_there = decode(model, method, prompts, steps, 1 << 40, small)
    half = all_there["fixed_bytes"] + all_there["device_block_bytes"] // 2
    mixed, moved = decode(model, method, prompts, steps, half, small)
    exact = model.dtype == torch.float32  # rows that are read in place come in another order, so roundings differ
    if mixed != whole or (exact and whole != expected):
        sys.exit(f"{method}: tokens depend on where blocks lie")
    if not moved["moved_bytes"] or not moved["kv_host_bytes"] or not moved["device_block_bytes"]:
        sys.exit(f"{method}: no block has moved in the check: {moved}")


def random_prompts(model: PreTrainedModel, count: int, length: int) -> torch.Tensor:
    """Return random token ids [count, length], every sequence its own."""
    return torch.randint(0, model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Check, then measure, one JSON line a placement."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=8, sizes="24x32768", steps=160, method=",".join(SIZES),
        device_memory="none,12GiB,auto", kv_dtype=str, host_memory=str, check=False, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    methods, stored = given.method.split(","), {} if given.kv_dtype is None else {"kv_dtype": given.kv_dtype}
    host = {} if given.host_memory is None else {"host_bytes": read_bytes(given.host_memory, "host_memory")}
    for method in methods if given.check else ():
        if method not in ("full", "auto"):
            check(model, method, SIZES[method] | stored)
    times: dict[tuple[str, int], dict[int, float]] = {}
    for seqs, length in ((int(n) for n in size.split("x")) for size in given.sizes.split(",")):
        prompts, all_tokens = random_prompts(model, seqs, length), dict[str, list[list[int]]]()
        for method in methods:
            sizes = SIZES[method] | ({} if method == "full" else stored)
            for memory in given.device_memory.split(",") if method not in ("full", "auto") else ["auto"]:
                own = sizes | ({} if method == "full" else host)
                tokens, found = decode(model, method, prompts, given.steps, memory, own)
                pooled = memory in PLACED and method not in ("full", "auto")  # rows in another order, so roundings differ
                expected = all_tokens.setdefault(f"{found['method_in_force']} {pooled}", tokens)
                same = tokens == expected
                setting = {"shape": given.shape, "layers": given.layers, "seqs": seqs, "length": length, "device": name}
                setting |= {"method": method, **sizes, "device_memory": memory, "steps": given.steps}
                report.record(setting, {**found, "same_tokens": same})
                if not same:
                    noted(f"{method}: tokens depend on where blocks lie")
                times.setdefault((method, seqs), {})[length] = found["mean_ms"]
    for method, seqs in times:
        crossing = crosses(times.get(("full", seqs), {}), times[method, seqs])
        if crossing is not None:
            print(f'"{name}": Crossing("{method}", {{{seqs}: {crossing}}})')


def crosses(full: dict[int, float], other: dict[int, float]) -> int | None:
    """Return from which length on the other is faster, by straight lines between and beyond the lengths that were timed; None where
    they never cross."""
    lengths = sorted(full.keys() & other.keys())
    gains = [(length, full[length] - other[length]) for length in lengths]
    for (a, low), (b, high) in pairwise(gains):
        if high > low and (high >= 0 or b == lengths[-1]):
            return max(0, round(a - low * (b - a) / (high - low)))
    return None


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
