"""Time a batch whose blocks lie on the host, on the device, or on both; every sequence and layer has rows of its own.

`python -m benchmarks.placement --out placement.jsonl`: 24 sequences of 32k tokens on eight layers of the 8B shape. Each method is
first checked on short prompts, under a device memory so small that blocks spill and come back while it decodes: its tokens must be
those with all blocks on the host. Then each placement is timed and its tokens are compared again. A line is one placement of one
method: milliseconds a step until the tokens are on the host, bytes by place, and bytes a step over the bus.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvthaw import Batch
from kvthaw.bench.card import provenance, where
from kvthaw.bench.shapes import build
from kvthaw.evaluate.results import Record

SIZES: dict[str, dict[str, Any]] = {
    "clusterkv-plus": {"budget": 1024},
    "pariskv": {"retrieved": 100},
    "pariskv-plus": {"retrieved": 100},
    "full": {},
}
WARM = 24


def decode(
    model: PreTrainedModel, method: str, prompts: torch.Tensor, steps: int, memory: int | str | None, sizes: dict[str, Any]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Decode `steps` tokens after each prompt [B, T]. Returns the tokens and what was measured after the first WARM of them."""
    room: dict[str, Any] = {} if method == "full" else {"device_memory": memory}
    batch = Batch(model, method, max_seqs=len(prompts), capacity=prompts.shape[1] + steps + 1, dense_layers=0, **sizes, **room)
    begin = time.perf_counter()
    requests = [batch.join(prompt, max_new_tokens=steps + 1, stop=[]) for prompt in prompts]
    _wait()
    joined, gaps = time.perf_counter() - begin, []
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
    model: PreTrainedModel, method: str, sizes: dict[str, Any], length: int = 2048, steps: int = 300, block_size: int = 64
) -> None:
    """Exit with an error if a method's tokens depend on where its blocks lie. Blocks are small, so that many of them move."""
    prompts, small = random_prompts(model, 3, length), {**sizes, "block_size": block_size}
    expected, _ = decode(model, method, prompts, steps, None, small)
    whole, all_there = decode(model, method, prompts, steps, 1 << 40, small)
    half = all_there["fixed_bytes"] + all_there["device_block_bytes"] // 2
    mixed, moved = decode(model, method, prompts, steps, half, small)
    if whole != expected or mixed != expected:
        sys.exit(f"{method}: tokens depend on where blocks lie")
    if not moved["moved_bytes"] or not moved["kv_host_bytes"] or not moved["device_block_bytes"]:
        sys.exit(f"{method}: no block has moved in the check: {moved}")


def random_prompts(model: PreTrainedModel, count: int, length: int) -> torch.Tensor:
    """Return random token ids [count, length], every sequence its own."""
    return torch.randint(0, model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Check, then measure, one JSON line a placement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seqs", type=int, default=24)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--method", default=",".join(SIZES))
    parser.add_argument("--device-memory", default="none,12GiB,auto", help="separated by commas; none: all blocks on the host")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, name = where()
    model, about = build(given.shape, device, layers=given.layers), provenance(given.commit)
    prompts = random_prompts(model, given.seqs, given.length)
    for method in given.method.split(","):
        sizes, expected = SIZES[method], None
        if method != "full":
            check(model, method, sizes)
        for memory in given.device_memory.split(",") if method != "full" else ["none"]:
            tokens, found = decode(model, method, prompts, given.steps, None if memory == "none" else memory, sizes)
            expected = expected or tokens
            same = tokens == expected
            setting = {"shape": given.shape, "layers": given.layers, "seqs": given.seqs, "length": given.length, "device": name}
            setting |= {"method": method, **sizes, "device_memory": memory, "steps": given.steps}
            line = Record(setting, {**found, "same_tokens": same, "about": about}).to_json()
            print(line, flush=True)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            if not same:
                sys.exit(f"{method}: tokens depend on where blocks lie")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
