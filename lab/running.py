"""Time the steps of a running batch under several methods in turns, then break one step of each down by kernels.

`python -m lab.running --method full,auto,pariskv-plus --device-memory none,auto --turns 2`: a line is one turn of one
method (see `lab.bench.serving`). Turns tell a method from what else the machine does. `--steps` then times steps of `--seqs`
sequences whose prompts have from `--shortest` to `--length` tokens; host_us: from when a step begins until it is on the device,
device_ms: from its first work there to its last. `--profile` breaks them down by kernels, and leaves a profiler in the process,
which slows the host.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvthaw import Batch
from kvthaw.engine.warm import warm
from kvthaw.evaluate.machine import where
from kvthaw.method_names import AUTO
from kvthaw.methods import resolve
from lab.bench.serving import Serving, measure
from lab.bench.shapes import build, random_ids
from lab.launches import launches
from lab.script import Report, options

WARM, STEPS = 24, 40
"""Steps before those that are timed, and these; the profiler takes a few more."""


def step_of(
    model: PreTrainedModel, method: str, lengths: list[int], settings: dict[str, Any], *, profile: bool
) -> dict[str, Any]:
    """Decode prompts of some lengths, of random tokens. Returns the times of steps, the host's part of them, and the kernels."""
    steps, clock = WARM + STEPS + 16, time.perf_counter
    batch = Batch(model, method, max_seqs=len(lengths), capacity=max(lengths) + steps + 1, **settings)
    warm(batch)  # as a batch that serves has done
    for seed, length in enumerate(lengths):
        request = batch.join(random_ids(model, 1, length, seed)[0], max_new_tokens=steps + 1, stop=())
        batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()
    launched, took, until, busy = 0.0, list[float](), list[float](), list[float]()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if model.device.type == "cuda" else (None, None)

    def note() -> None:
        nonlocal launched
        launched = clock()
        if last is not None:
            last.record()

    batch.launched = note
    for step in range(WARM + STEPS):
        begin = clock()
        if first is not None:
            first.record()
        batch.step()
        if step >= WARM:
            took.append(clock() - begin)
            until.append(launched - begin)
            if first is not None and last is not None:
                busy.append(first.elapsed_time(last))
    took.sort()
    found = {
        "median_ms": 1e3 * statistics.median(took),
        "p95_ms": 1e3 * took[int(0.95 * len(took))],
        "host_us": 1e6 * statistics.median(until),
        "device_ms": statistics.median(busy) if busy else None,
        "method_in_force": batch.stats().method,
        "device_rate": batch.stats().device_rate,
    }
    if profile:
        found |= launches(batch.step)
    batch.launched = lambda: None
    batch.cache.reset()
    del batch
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def settings_of(method: str, sizes: dict[str, Any], memory: str | None, kv_dtype: str | None) -> dict[str, Any]:
    """Return a batch's settings under a method, none where it keeps all KV as it comes."""
    if method != AUTO and resolve(method).dense:
        return {}
    stored = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    return sizes | stored | ({} if memory is None else {"device_memory": memory})


def main() -> None:
    """Measure in turns, then profile; one JSON line each."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, method="full,auto,pariskv-plus", seqs=4, length=16384, shortest=int, budget=1024,
        retrieved=0, dense_layers=int, device_memory="none", kv_dtype=str, requests=6, turns=1, steps=False,
        profile=False, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    memories = [None if memory == "none" else memory for memory in given.device_memory.split(",")]
    cases = [
        (method, memory)
        for method in given.method.split(",")
        for memory in (memories if method == AUTO or not resolve(method).dense else [None])
    ]
    for turn in range(given.turns):
        for method, memory in cases:
            asked = Serving(
                shape=given.shape, length=given.length, max_seqs=given.seqs, requests=given.requests, budget=given.budget,
                device_memory=memory,
            )  # fmt: skip
            setting = {"bench": "serving", "method": method, "layers": given.layers, "turn": turn, "length": given.length}
            setting |= {"max_seqs": given.seqs, "requests": given.requests, "budget": given.budget, "device_memory": memory}
            report.record(setting | {"device": name}, measure(model, method, asked))
            gc.collect()
    shortest = given.shortest or given.length
    lengths = [given.length - i * (given.length - shortest) // max(1, given.seqs - 1) for i in range(given.seqs)]
    sizes: dict[str, Any] = {"retrieved": given.retrieved} if given.retrieved else {"budget": given.budget}
    if given.dense_layers is not None:
        sizes["dense_layers"] = given.dense_layers
    for method, memory in dict.fromkeys(cases) if given.profile else cases if given.steps else ():
        setting = {"bench": "step", "shape": given.shape, "method": method, "layers": given.layers, "seqs": given.seqs}
        setting |= {"length": given.length, "shortest": shortest, "kv_dtype": given.kv_dtype, "device_memory": memory, **sizes}
        settings = settings_of(method, sizes, memory, given.kv_dtype)
        found = step_of(model, method, lengths, settings, profile=given.profile)
        report.record(setting | {"device": name}, found)


if __name__ == "__main__":
    main()
