"""Time what requests notice of a long prompt that joins a running batch beside them.

`python -m lab.joining --out joining.jsonl`: on some layers of the 8B shape seven sequences decode, a long prompt joins, and
a short request comes while it is prefilled. A line is one method: the time between two tokens of the seven, meanwhile and before,
the first token of the short request after it came, that of the long one, and how late that is against the long prompt alone; of
the longest steps what they did. Every
method's tokens are first compared, on a tiny model, with those of the requests alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw import Batch, Request, Scheduler
from kvthaw.cache import page_locked
from kvthaw.cache.passes import updaters
from kvthaw.engine.warm import frozen, warm
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import noted
from kvthaw.formatting import read_bytes
from kvthaw.method_names import AUTO
from kvthaw.methods import resolve
from lab.arrivals import random_prompt
from lab.bench.shapes import build
from lab.fill import prompts_drawn
from lab.script import Report, options

WARM = 30
"""Steps before the long prompt joins."""
MOST = 2000
"""Tokens that those who decode may get: more than there are steps."""


class Watch:
    """Takes steps of a scheduler, each timed. steps: of each the time, tokens of prompts that it brought and those before them, the
    layers it indexed, the memory that was page-locked meanwhile, and what the step itself did to that end (`lock`), launched of a
    prompt (`launch`, locks included) and waited for the chunk before (`wait`): calls and milliseconds. What a step launches for a
    prompt the next one waits for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.steps, self._sums = scheduler, list[dict[str, Any]](), dict[str, float]()
        batch, lock, own = scheduler.batch, page_locked.page_lock, threading.get_ident()

        def timed(name: str, call: Callable[..., Any], *given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given)
            finally:
                if threading.get_ident() == own:
                    self._add(name, 1)
                    self._add(f"{name}_ms", round(1000 * (time.perf_counter() - begin), 2))

        def counted(size: int, blocks: int, runtime: Any) -> Any:
            self._add("locked_mb", size * blocks >> 20)
            return timed("lock", lock, size, blocks, runtime)

        page_locked.page_lock = counted
        batch.prompts._run = partial(timed, "launch", batch.prompts._run)  # type: ignore[method-assign]
        finite = batch.cache.kv.finite
        finite.prompt = partial(timed, "wait", finite.prompt)  # type: ignore[method-assign]

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0) + value

    def step(self) -> float:
        """Take a step, whose tokens come back to the host. Returns the seconds that it took."""
        scheduler, stale = self._scheduler, self._stale()
        self._sums.clear()
        before = {request: request.prefilled for request in scheduler.batch.requests}
        begin = time.perf_counter()
        scheduler.step()
        took = time.perf_counter() - begin
        depths = {one: before.get(one, 0) for one in (*before, *scheduler.batch.requests)}
        moved = [(one.prefilled - depth, depth) for one, depth in depths.items() if one.prefilled > depth]
        step = {"step": len(self.steps), "ms": round(1000 * took, 2), "chunks": moved}
        step |= {"indexed": max(0, stale - self._stale()), "locked_mb": 0, **self._sums}
        self.steps.append(step)
        return took

    def _stale(self) -> int:
        return sum(len(updater.stale) for _, updater in updaters(self._scheduler.batch.cache.kv.offloaded))


def serve(scheduler: Scheduler, others: list[Tensor], long: Tensor, short: Tensor, new: int) -> dict[str, Any]:
    """Decode the others, let the long prompt join, and the short one when a third of it has come. Returns times in seconds."""
    decoding = [scheduler.submit(ids, max_new_tokens=MOST, stop=()) for ids in others]
    while not all(one.tokens for one in decoding):
        scheduler.step()
    gaps: dict[str, list[float]] = {"before": [], "meanwhile": []}
    watch = Watch(scheduler)
    for _ in range(WARM):
        gaps["before"].append(watch.step())
    watch.steps.clear()
    joined = time.perf_counter()
    long_one = scheduler.submit(long, max_new_tokens=new, stop=())
    short_one, came = None, 0.0
    found: dict[str, Any] = {}
    while not (long_one.finished and short_one is not None and short_one.finished):
        if short_one is None and long_one.prefilled >= len(long) // 3:
            came, short_one = time.perf_counter(), scheduler.submit(short, max_new_tokens=new, stop=())
        took = watch.step()
        if not long_one.tokens or "long_first_s" not in found:
            gaps["meanwhile"].append(took)
        if short_one is not None and short_one.tokens:
            found.setdefault("short_first_s", time.perf_counter() - came)
        if long_one.tokens:
            found.setdefault("long_first_s", time.perf_counter() - joined)
    for one in decoding:
        scheduler.cancel(one)
    for name, taken in gaps.items():
        ranked = sorted(taken)
        found |= {
            f"{name}_p50_s": statistics.median(ranked),
            f"{name}_p99_s": ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))],
            f"{name}_max_s": ranked[-1],
            f"{name}_steps": len(ranked),
        }
    locks = {name: sum(step.get(name, 0) for step in watch.steps) for name in ("lock", "lock_ms", "locked_mb")}
    return found | locks | {"longest": sorted(watch.steps, key=lambda step: -step["ms"])[:8]}


def alone(scheduler: Scheduler, long: Tensor) -> float:
    """Seconds until the first token of the long prompt where nobody else is served."""
    begin = time.perf_counter()
    request = scheduler.submit(long, max_new_tokens=1, stop=())
    while not request.finished:
        scheduler.step()
    return time.perf_counter() - begin


def page_locking() -> dict[str, float]:
    """Milliseconds that it takes to page-lock a block of 4 MiB while the device is idle and while it has work for some 200 ms, for
    all of which a call may wait; and those of the longest launch beside such work while another thread page-locks 64 blocks."""
    work, lock = partial(torch.cuda._sleep, 400_000_000), partial(page_locked.page_lock, 4 << 20, runtime=torch.cuda.cudart())
    held, number = [lock(1)], torch.zeros(1, device="cuda").add_(1)

    def ms(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return round(1000 * (time.perf_counter() - begin), 2)

    torch.cuda.synchronize()
    found = {"idle": ms(lambda: held.append(lock(1)))}
    work()
    found |= {"at_work": ms(lambda: held.append(lock(1))), "work_left": ms(torch.cuda.synchronize), "longest_launch": 0.0}
    beside = threading.Thread(target=lambda: held.append(lock(64)))
    work()
    beside.start()
    while beside.is_alive():
        found["longest_launch"] = max(found["longest_launch"], ms(lambda: number.add_(1)))
        time.sleep(0.001)
    return found | {"work_left_beside": ms(torch.cuda.synchronize)}


def check(method: str, budget: int, device: torch.device) -> bool:
    """Return whether requests of a tiny model get the tokens in company that they get alone, and say so where they do not."""
    model = build("tiny", device).float()
    words = model.config.vocab_size
    prompts, sizes = [random_prompt(words, n, n) for n in (150, 600, 100)], sizes_of(method, min(budget, 64))
    found = []
    for seqs in (1, 3):
        scheduler = Scheduler(Batch(model, method, max_seqs=seqs, capacity=700, prefill_chunk=128, **sizes), step_tokens=64)
        requests: list[Request] = [scheduler.submit(ids, max_new_tokens=30, stop=()) for ids in prompts]
        while scheduler.busy:
            scheduler.step()
        found.append([one.tokens for one in requests])
    if found[0] != found[1]:
        noted(f"{method}: a request in company gets other tokens than alone")
    return found[0] == found[1]


def sizes_of(method: str, budget: int, memory: str | None = None, host: str | None = None) -> dict[str, Any]:
    """Return the settings that bound a method, none for one that keeps all KV."""
    if method != AUTO and resolve(method).dense:
        return {}
    limits = {"device_memory": memory, "host_bytes": None if host is None else read_bytes(host, "host_memory")}
    return {"budget": budget} | {name: limit for name, limit in limits.items() if limit is not None}


def main() -> None:
    """Check, then measure, one JSON line a method."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=8, seqs=7, length=8192, long=131072, short=1024, budget=1024, step_tokens=4096,
        device_memory=str, host_memory=str, unchecked=False, method="full,pariskv,icecache-digest", commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    checked = {method: None if given.unchecked else check(method, given.budget, device) for method in given.method.split(",")}
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    words, locking = model.config.vocab_size, page_locking() if device.type == "cuda" else None
    others = [random_prompt(words, given.length, seed) for seed in range(given.seqs)]
    long, short = random_prompt(words, given.long, 100), random_prompt(words, given.short, 101)
    for method, same in checked.items():
        sizes = sizes_of(method, given.budget, given.device_memory, given.host_memory)
        batch = Batch(model, method, max_seqs=given.seqs + 2, capacity=given.long + 2048, **sizes)
        begin = time.perf_counter()
        warm(batch)
        noted(f"{method}: warm after {time.perf_counter() - begin:.1f} s")
        scheduler = Scheduler(batch, step_tokens=given.step_tokens)
        for some in (short, long[: 3 * len(long) // 8]):
            alone(scheduler, some)  # compiles kernels, and plans attention of all of its chunks
        with prompts_drawn(model):
            alone(scheduler, long)  # takes host memory
        with frozen():
            quiet = alone(scheduler, long)
            noted(f"{method}: the long prompt alone {quiet:.2f} s, {time.perf_counter() - begin:.1f} s after the beginning")
            found = serve(scheduler, others, long, short, 16)
        setting = {key: value for key, value in vars(given).items() if key not in ("out", "commit", "method", "unchecked")}
        setting |= {"method": method, "device": name}
        found |= {"long_alone_s": quiet, "long_later": found["long_first_s"] / quiet, "captures": batch.stats().captures}
        found |= {"same_alone": same, "page_locking_ms": locking}
        report.record(setting, found)
        batch.cache.reset()
        del batch, scheduler


if __name__ == "__main__":
    main()
