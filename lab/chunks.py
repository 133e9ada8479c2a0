"""Time single chunks of a prompt that joins a running batch, and what the device does in one.

`python -m lab.chunks --out chunks.jsonl`: seven sequences of the 8B shape decode, and prompts whose first tokens have drawn
keys and values go on, from some depths on. Lines: the end of a prompt under the scheduler, each step with what it did and how long
it took; chunks of some lengths at some depths, with a step of the seven before each (`decoding`) and without; one chunk under the
profiler. The host's part is the time until a chunk is on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvthaw import Batch, Request, Scheduler
from kvthaw.engine.warm import warm
from kvthaw.evaluate.machine import where
from lab.arrivals import random_prompt
from lab.bench.shapes import build
from lab.fill import prompts_drawn
from lab.joining import MOST, Watch, sizes_of
from lab.launches import part_of
from lab.script import Report, options

_TAIL = 10
"""Chunks before the end of a prompt, about."""
_CHUNKS = 3
"""Chunks of one length after each other."""


@contextmanager
def filled(batch: Batch, tokens: int, depth: int) -> Iterator[Request]:
    """Within it a request of so many tokens is in the batch, the first `depth` of which have drawn keys and values."""
    request = batch.join(random_prompt(batch.vocabulary, tokens, tokens), max_new_tokens=2, stop=())
    with prompts_drawn(batch.model):
        batch.prefill(request, depth)
    try:
        yield request
    finally:
        if not request.finished:
            batch.leave(request)


def end_of(scheduler: Scheduler, tokens: int, depth: int) -> dict[str, Any]:
    """Take steps until a prompt of so many tokens, filled up to a depth, has its first token."""
    with filled(scheduler.batch, tokens, depth) as request:
        scheduler._queue._rank[request] = 0, -1
        synchronize()
        watch = Watch(scheduler)
        while not request.tokens:
            watch.step()
        scheduler.step()
    return {"steps": watch.steps, "max_ms": max(step["ms"] for step in watch.steps)}


def timed(batch: Batch, request: Request, tokens: int, *, decoding: bool) -> dict[str, Any]:
    """Bring chunks of so many tokens, each behind a step of those that decode where they do. ms: of a chunk and such a step."""
    whole, host, depth = list[float](), list[float](), request.prefilled
    for _ in range(_CHUNKS):
        begin = time.perf_counter()
        if decoding:
            batch.launch()
        batch.prefill(request, tokens)
        host.append(time.perf_counter() - begin)
        batch.read(ahead=True)  # of the step before this chunk, as the scheduler does
        whole.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    synchronize()
    last = time.perf_counter() - begin
    seconds = sum(whole[1:]) / len(whole[1:]) if decoding else (sum(whole) + last) / len(whole)
    times = {"ms": round(1000 * seconds, 2), "host_ms": round(1000 * min(host), 2)}
    return {"depth": depth, "tokens": tokens, "decoding": decoding} | times


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """Where the device's time goes in one step, ms: from its first work to its last; that in which kernels ran, and copies from the
    host; the sums of both by part and direction; the longest kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        synchronize()
    spans, sums, names = dict[str, list[tuple[float, float]]](), dict[str, float](), dict[str, list[float]]()
    for event in seen.events() or ():
        if event.device_type.name != "CUDA":
            continue
        span, us = (event.time_range.start, event.time_range.end), event.time_range.elapsed_us()
        part = part_of(event.name)
        kind = event.name if part == "copies" else "kernels"
        spans.setdefault(kind, []).append(span)
        name = event.name[:90]
        names.setdefault(name, []).append(us)
        sums[kind if part == "copies" else part] = sums.get(kind if part == "copies" else part, 0.0) + us / 1000
    every = [span for some in spans.values() for span in some]
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "device_ms": round((max(e for _, e in every) - min(b for b, _ in every)) / 1000, 2) if every else 0.0,
        "busy_ms": {kind: round(_covered(some) / 1000, 2) for kind, some in spans.items()},
        "sums_ms": {kind: round(ms, 2) for kind, ms in sums.items()},
        "longest": [{"name": name, "launches": len(some), "ms": round(sum(some) / 1000, 2)} for name, some in longest],
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Measure, a JSON line each as it comes."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=32, seqs=7, length=8192, long=131072, budget=1024, depths="32768,65536,122880",
        tokens="2048,2560,4096", device_memory=str, host_memory=str, method="pariskv-plus", step_tokens=4096, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    depths, tokens = ([int(n) for n in text.split(",")] for text in (given.depths, given.tokens))
    most = max(max(depths) + 2 * _CHUNKS * sum(tokens), given.long, 30720 + sum(tokens)) + 1024
    begin = time.perf_counter()
    sizes = sizes_of(given.method, given.budget, given.device_memory, given.host_memory)
    batch = Batch(model, given.method, max_seqs=given.seqs + 1, capacity=most, **sizes)
    warm(batch)
    print(f"warm after {time.perf_counter() - begin:.1f} s", flush=True)
    setting = {"shape": given.shape, "layers": given.layers, "seqs": given.seqs, "length": given.length, "budget": given.budget}
    setting |= {"method": given.method, "device_memory": given.device_memory, "device": name}
    scheduler = Scheduler(batch, step_tokens=given.step_tokens)
    with prompts_drawn(model):
        for seed in range(given.seqs):
            scheduler.submit(random_prompt(batch.vocabulary, given.length, seed), max_new_tokens=MOST, stop=())
        while len(batch.decoding) < given.seqs:
            scheduler.step()
    end_of(scheduler, given.long, given.long - given.step_tokens)  # takes host memory
    report.record(
        setting | {"what": "end"}, end_of(scheduler, given.long, given.long - _TAIL * 2560 * given.step_tokens // 4096)
    )
    with filled(batch, most - 16, 16384 + 8192 + 4096 + 2048) as request:
        for count in tokens:
            batch.prefill(request, count)  # plans attention
    for depth in depths:
        with filled(batch, most - 16, depth) as request:
            for count in tokens:
                for decoding in (True, False) if depth == depths[-1] else (True,):
                    report.record(setting | {"what": "chunk"}, timed(batch, request, count, decoding=decoding))
    with filled(batch, most - 16, depths[-1]) as request:
        batch.prefill(request, tokens[1])
        synchronize()

        def step() -> None:
            batch.launch()
            batch.prefill(request, tokens[1])
            batch.read()

        if device.type == "cuda":
            found = {"depth": request.prefilled, "tokens": tokens[1]}
            report.record(setting | {"what": "profile"}, found | profiled(step))


if __name__ == "__main__":
    main()
