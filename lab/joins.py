"""Time steps of a running batch that a short prompt joins, and where their time goes on host and device.

`python -m lab.joins --method clusterkv-plus --out joins.jsonl`: on some layers of the 8B shape all places but one decode
behind prompts of --length tokens, and such prompts join, get two or three tokens and leave. Lines: steps with nothing else, with a
prompt, and the next ones, ms; those with a prompt that joins as soon as another has left, with the MB page-locked in each
(`relay`); what Python does in a step with a prompt, by function; what the device does in a step.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvthaw import Batch, Scheduler
from kvthaw.engine.warm import frozen, warm
from kvthaw.evaluate.machine import where
from lab.arrivals import random_prompt
from lab.bench.shapes import build
from lab.chunks import profiled
from lab.joining import MOST, Watch, sizes_of
from lab.script import Report, options

_PLAIN, _JOINS, _PROFILED = 40, 16, 6
_NAMED = 40
"""Functions of a profile that are told."""


def joined(scheduler: Scheduler, length: int, seed: int, step: Callable[[], Any]) -> list[float]:
    """Let a prompt join, and return how long the steps took until it has left, ms. step: takes the one with the prompt."""
    request = scheduler.submit(random_prompt(scheduler.batch.vocabulary, length, seed), max_new_tokens=2, stop=())
    took = []
    while not request.finished:
        begin = time.perf_counter()
        (scheduler.step if request.tokens else step)()
        took.append(1000 * (time.perf_counter() - begin))
    for _ in range(3):
        scheduler.step()
    return took


def by_function(profile: cProfile.Profile, times: int) -> list[dict[str, Any]]:
    """Return the functions that took longest themselves: calls, and ms without and with what they call, of one of so many times."""
    rows: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    longest = sorted(rows.items(), key=lambda row: -row[1][2])[:_NAMED]
    return [
        {"name": f"{'/'.join(file.split('/')[-2:])}:{line} {name}", "calls": round(calls / times, 1)}
        | {"own_ms": round(1000 * own / times, 3), "ms": round(1000 * whole / times, 3)}
        for (file, line, name), (_, calls, own, whole, _) in longest
    ]


def main() -> None:
    """Measure, a JSON line each as it comes."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=8, seqs=24, length=1000, capacity=131072, budget=1024, device_memory=str,
        host_memory=str, method="auto", commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    setting = {key: value for key, value in vars(given).items() if key not in ("out", "commit")} | {"device": name}
    sizes = sizes_of(given.method, given.budget, given.device_memory, given.host_memory)
    scheduler = Scheduler(Batch(model, given.method, max_seqs=given.seqs, capacity=given.capacity, **sizes))
    begin = time.perf_counter()
    warm(scheduler.batch)
    print(f"warm after {time.perf_counter() - begin:.1f} s", flush=True)
    with frozen():
        for seed in range(given.seqs - 1):
            new = min(MOST, given.capacity - given.length)
            scheduler.submit(random_prompt(scheduler.batch.vocabulary, given.length, seed), max_new_tokens=new, stop=())
        while len(scheduler.batch.decoding) < given.seqs - 1:
            scheduler.step()
        for seed in range(3):
            joined(scheduler, given.length, seed, scheduler.step)
        plain = []
        for _ in range(_PLAIN):
            begin = time.perf_counter()
            scheduler.step()
            plain.append(1000 * (time.perf_counter() - begin))
        took = [joined(scheduler, given.length, seed, scheduler.step) for seed in range(_JOINS)]
        found: dict[str, Any] = {"plain_ms": round(statistics.median(plain), 2), "captures": scheduler.batch.stats().captures}
        found["joins_ms"] = [[round(ms, 2) for ms in own] for own in took]
        found |= {"join_ms": round(statistics.median(own[0] for own in took), 2)}
        report.record(setting | {"what": "steps"}, found | {"next_ms": round(statistics.median(own[1] for own in took), 2)})
        watch = Watch(scheduler)
        for seed in range(_JOINS):
            scheduler.submit(random_prompt(scheduler.batch.vocabulary, given.length, seed), max_new_tokens=3, stop=())
        while scheduler.waiting or len(scheduler.batch.requests) == given.seqs:
            watch.step()
        relay = [(step["ms"], step["locked_mb"]) for step in watch.steps if step["chunks"]]
        report.record(setting | {"what": "relay"}, {"relay": relay, "join_ms": statistics.median(ms for ms, _ in relay)})
        python = cProfile.Profile()
        for seed in range(_PROFILED):
            joined(scheduler, given.length, seed, lambda: python.runcall(scheduler.step))
        report.record(setting | {"what": "python"}, {"functions": by_function(python, _PROFILED)})
        if device.type == "cuda":
            report.record(setting | {"what": "plain"}, profiled(scheduler.step))
            of_join = dict[str, Any]()
            joined(scheduler, given.length, 0, lambda: of_join.update(profiled(scheduler.step)))
            report.record(setting | {"what": "join"}, of_join)


if __name__ == "__main__":
    main()
