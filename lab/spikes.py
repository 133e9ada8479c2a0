"""Time single steps of methods over whole periods of their index updates: which are longer than the others, and by how much.

`python -m lab.spikes --out spikes.jsonl` on a GPU: eight layers of the 8B shape, one sequence of 128k random tokens, and
random ones behind it, captured, no dense layers. 640 steps are two periods of ClusterKV's updates and five of PRKV's. A line is one
method: of the steps, the device at rest between them, median_ms, mean_ms, p99_ms, max_ms and the last three in medians (goals 1.1
and 1.5; while blocks spill no step above 1.3); over: how many steps took more than so many medians; longest: the longest steps and
what is known to have happened in them, see `Events`. `--filled`: keys and values are drawn instead of a prefill, of each layer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvthaw import Cache
from kvthaw.bench.steps import most_warm, prefill, take
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import noted
from kvthaw.kernels import HAS_TRITON
from lab.bench.shapes import build, random_ids, random_tokens
from lab.fill import drawn, fill
from lab.script import Report, options

if HAS_TRITON:
    from triton import knobs

_OVER = (1.1, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)
_RETRIEVED = {"pariskv": 100, "pariskv-plus": 100}


class Events:
    """What makes a step long and is no work of its own, while it is entered: Python's garbage collection (collected_ms), kernels
    that Triton compiles or loads (compiled), memory that torch takes from the device (reserved_mb). next() begins a step."""

    def __init__(self) -> None:
        self.step, self._began, self._reserved = -1, 0.0, 0
        self._known = defaultdict[int, dict[str, Any]](dict)

    def next(self) -> None:
        """Begin a step."""
        now = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        if now != self._reserved and self.step >= 0:
            self._known[self.step]["reserved_mb"] = (now - self._reserved) >> 20
        self.step, self._reserved = self.step + 1, now

    def longest(self, times: Sequence[float], count: int = 8) -> list[dict[str, Any]]:
        """Return the longest of the latest steps, of which these are the ms, with their numbers."""
        ranked, first = sorted(range(len(times)), key=lambda i: -times[i])[:count], self.step + 1 - len(times)
        return [{"step": first + i, "ms": round(times[i], 3), **self._known.get(first + i, {})} for i in ranked]

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            known = self._known[self.step]
            known["collected_ms"] = known.get("collected_ms", 0.0) + 1e3 * (time.perf_counter() - self._began)

    def _compiles(self, *, fn: Any, **about: Any) -> None:
        self._known[self.step].setdefault("compiled", []).append(fn.name)

    def __enter__(self) -> Self:
        gc.callbacks.append(self._collects)
        if HAS_TRITON:
            knobs.runtime.jit_post_compile_hook = self._compiles
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._collects)
        if HAS_TRITON:
            knobs.runtime.jit_post_compile_hook = None


@torch.no_grad()
def measure(
    model: PreTrainedModel, method: str, length: int, steps: int, *, filled: bool = False, **sizes: Any
) -> dict[str, Any]:
    """Prefill a prompt and take the steps behind those that compile and capture."""
    cache = Cache(model, method, dense_layers=0, **sizes)
    begin = time.perf_counter()
    if filled:
        fill(cache, lambda number: drawn(model, number, length, 1), coming=steps + most_warm(model.device))
    else:
        prefill(model, cache, random_ids(model, 1, length, 1))
    prompt = time.perf_counter() - begin
    with Events() as events:

        def tokens() -> Iterator[Tensor]:
            for ids in random_tokens(model, 1, 0):
                events.next()
                yield ids

        taken = take(model, cache, tokens(), steps, capture=True)
    times = [1e3 * gap for gap in taken.gaps]
    median = statistics.median(times)
    found = {"mean": statistics.mean(times), "p99": 1e3 * taken.quantile(0.99), "max": max(times)}
    return {
        "median_ms": median,
        **{f"{name}_ms": ms for name, ms in found.items()},
        **{f"{name}_over_median": ms / median for name, ms in found.items()},
        "over": {str(over): sum(ms > over * median for ms in times) for over in _OVER},
        "longest": events.longest(times),
        "prompt_s": prompt,
        "captures": None if cache.replay is None else cache.replay.captures,
    }


def main() -> None:
    """Measure, one JSON line a method."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=8, length=131072, steps=640,
        method="clusterkv-plus,prkv,clusterkv,prkv-plus,pariskv-plus", filled=False, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    for method in given.method.split(","):
        sizes = {"retrieved": _RETRIEVED[method]} if method in _RETRIEVED else {"budget": 1024}
        setting = {"shape": given.shape, "layers": model.config.num_hidden_layers, "device": name, "method": method}
        setting["prompt"] = "filled" if given.filled else "run"
        try:
            found = measure(model, method, given.length, given.steps, filled=given.filled, **sizes)
        except Exception as error:  # the others are still to be measured
            noted(f"{method}: {type(error).__name__}: {error}")
            continue
        report.record({**setting, "length": given.length, "steps": given.steps, **sizes}, found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
