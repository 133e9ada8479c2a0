"""IceCache behind `attach`: a prompt in chunks until its second token, then captured steps on the cache that it leaves.

usage: python3 -m benchmarks.second_token [--prompts [RUNSx]METHOD/LENGTH[@STEPS],...] [--out FILE] [--commit HASH]

A line a run of a prompt (bench prefill, with the fields of `kvthaw bench prefill`); the first takes host memory from the system,
and where there are more, the last builds its trees once more with nothing beside. One for the steps behind it (bench decode).
host_ms: of a step what the host waits for a query of the device, what it takes to choose rows for it, of that the search, and what
launching what follows.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import Report, options, run_as_script
from kvthaw.bench.card import where
from kvthaw.bench.decode import Bench, free
from kvthaw.bench.prefill import PrefillSetting, build_alone
from kvthaw.bench.settings import DecodeSetting, setting
from kvthaw.bench.steps import WARM, random_ids, random_tokens, take
from kvthaw.cache.layers import indexed_layers
from kvthaw.cache.segmented_graph import SegmentedGraph
from kvthaw.engine.hf import attach
from kvthaw.errors import ConfigError
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.results import ResultsFile
from kvthaw.native import Forest


@contextmanager
def host_times(spent: defaultdict[str, float]) -> Iterator[None]:
    """Within it, replays with searches on the host add the seconds of their parts."""

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given)
            finally:
                spent[name] += time.perf_counter() - begin

        return run

    def replay(self: SegmentedGraph) -> None:
        for graph, call in zip(self._graphs, self._calls, strict=False):
            timed("launch", graph.replay)()
            self._reached.record()
            timed("wait", self._reached.synchronize)()
            timed("choose", call)()
        timed("launch", self._graphs[-1].replay)()

    before = SegmentedGraph.replay, Forest.select
    SegmentedGraph.replay, Forest.select = replay, timed("search", Forest.select)  # type: ignore[method-assign]
    try:
        yield
    finally:
        SegmentedGraph.replay, Forest.select = before  # type: ignore[method-assign]


@torch.no_grad()
def measure(bench: Bench, one: DecodeSetting, chunk: int, *, runs: int, steps: int, say: Callable[..., None]) -> None:
    """Take a prompt in `runs` times, and `steps` tokens behind the last."""
    model, ids, spent = bench.model, random_ids(bench.model, 1, one.length, seed=one.length), defaultdict[str, float](float)
    sizes: dict[str, Any] = {} if one.dense else {"budget": one.budget, "dense_layers": one.dense_layers}
    asked = PrefillSetting(
        shape=one.shape, method=one.method, length=one.length, chunk=chunk, budget=sizes.get("budget"), retrieved=None,
        dense_layers=sizes.get("dense_layers"), device=one.device,
    )  # fmt: skip
    for run in range(runs):
        free()
        with host_times(spent), attach(model, one.method, prefill_chunk=chunk, **sizes) as handle:
            begin, last = now(model.device), run == runs - 1
            model(ids, logits_to_keep=1)
            found: dict[str, Any] = {"seconds": now(model.device) - begin}
            handle.cache.wait()
            found["indexed_s"] = now(model.device) - begin
            updaters = [updater for _, updater in indexed_layers(handle.cache.kv.layers)]
            model(ids[:, -1:], past_key_values=handle.cache)
            found["tt2t_s"] = now(model.device) - begin
            found["index_alone_s"] = build_alone(updaters) if 0 < run == runs - 1 else None
            say("prefill", asdict(asked), {**found, "runs_before": run})
            if last and steps:
                cache, tokens = handle.cache, random_tokens(model, 1, one.seed)
                take(model, cache, tokens, 1, WARM, capture=True)
                spent.clear()
                taken = take(model, cache, tokens, steps, 0, capture=True)
                parts = {name: 1e3 * seconds / steps for name, seconds in spent.items()}
                until = {"fill_s": None, "ttft_s": found["seconds"], "tt2t_s": found["tt2t_s"]}
                say("decode", one.to_dict(), {**until, **bench.taken(one, cache, taken), "host_ms": parts})
            del updaters
        del handle
    free()


def main() -> None:
    """See the module."""
    given = options(
        __doc__, shape="llama-3.1-8b", prompts="2xfull/36864,2xicecache/36864,2xicecache-digest/36864@64", chunk=16384, budget=256,
        dense_layers=2, out=Path, commit=str,
    )  # fmt: skip
    report, bench = Report(given.out, given.commit), Bench(ResultsFile(None), commit=given.commit)
    bench.prepare(given.shape)

    def say(kind: str, setting: dict[str, Any], found: dict[str, Any]) -> None:
        report.record(setting, {"bench": kind, **found})

    for prompt in given.prompts.split(","):
        asked = re.fullmatch(r"(?:(\d+)x)?(.+)/(\d+)(?:@(\d+))?", prompt)
        if asked is None:
            raise ConfigError(f"prompts has {prompt!r}; it must be [RUNSx]METHOD/LENGTH[@STEPS]")
        method, (runs, length, steps) = asked[2], (int(asked[i] or 0) for i in (1, 3, 4))
        device, ways = where()[1], "captured" if torch.cuda.is_available() else "eager"
        sizes = {"budget": given.budget, "retrieved": None, "dense_layers": given.dense_layers, "new_tokens": steps or 2}
        one = setting(method, shape=given.shape, steps=ways, length=length, batch=1, seed=0, device=device, **sizes)
        measure(bench, one, given.chunk, runs=max(1, runs), steps=steps, say=say)


if __name__ == "__main__":
    run_as_script(main)
