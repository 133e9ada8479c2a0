"""IceCache behind `attach`: a prompt in chunks until its second token, then steps on the cache that it leaves.

usage: python3 -m lab.second_token [--prompts [RUNSx]METHOD/LENGTH[/LAYERS][@STEPS],...] [--out FILE] [--commit HASH]

A line a run of a prompt (with the fields of `python -m lab bench prefill`). The first takes host memory from the system.
All but the last wait until every tree is built before they ask for the second token (indexed_s). The last asks at once as users
do, and its first layers attend while the last layers' trees are built; if not the first it then builds its trees once more with
nothing beside. 0x: no prompt; the cache is filled with drawn keys and values, each layer's own (fill_s, of bench decode).
One line for the steps behind it (bench decode), captured where the method can be.
host_ms: of a step what the host waits for a query of the device, what it takes to choose rows for it, of that the search (heads: of
all threads together; longest: of each layer the longest piece of one), and what launching what follows takes.
huge_bytes: how much of this process's memory lies in huge pages.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvthaw.bench.decode import free
from kvthaw.bench.settings import possible
from kvthaw.bench.steps import WARM, take
from kvthaw.cache.passes import updaters
from kvthaw.cache.streams import SegmentedGraph
from kvthaw.engine.hf import Cache, DynamicCache, Handle, PreTrainedModel, attach
from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate.machine import now, where
from kvthaw.evaluate.results import ResultsFile, noted
from kvthaw.native import Forest
from lab.ablations import registered
from lab.bench.prefill import PrefillSetting, build_alone
from lab.bench.settings import ShapeSetting, setting
from lab.bench.shaped import ShapeBench
from lab.bench.shapes import build, random_ids, random_tokens
from lab.fill import drawn, fill
from lab.page_order import PagedTreeIndex
from lab.script import Report, options, run_as_script

ASKED = re.compile(r"(?:(\d+)x)?([^/]+)/(\d+)(?:/(\d+))?(?:@(\d+))?")


@contextmanager
def host_times(spent: defaultdict[str, float]) -> Iterator[None]:
    """Within it, steps with searches on the host add the seconds of their parts."""

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

    def search(self: Forest, *given: Any) -> None:
        earlier = self.search_ns()
        timed("search", select)(self, *given)
        for name, since, until in zip(("heads", "longest"), earlier, self.search_ns(), strict=True):
            spent[name] += 1e-9 * (until - since)

    before = SegmentedGraph.replay, (select := Forest.select)
    SegmentedGraph.replay, Forest.select = replay, search  # type: ignore[method-assign]
    try:
        yield
    finally:
        SegmentedGraph.replay, Forest.select = before  # type: ignore[method-assign]


class Prompts:
    """Prompts and steps of one shape. chunk: tokens of a prompt at once. say: is given each line's kind, setting and the rest."""

    def __init__(self, shape: str, chunk: int, bench: ShapeBench, say: Callable[..., None]) -> None:
        self.shape, self.chunk, self.bench, self.say = shape, chunk, bench, say
        self.model: PreTrainedModel
        self.layers = -1

    def prepare(self, layers: int) -> None:
        """Have the model, or so many of its layers; 0: all."""
        if layers != self.layers:
            if self.layers >= 0:
                del self.model, self.bench.model
                free()
            self.model = self.bench.model = build(self.shape, self.bench.device, layers=layers or None)
            self.layers = layers

    @torch.no_grad()
    def measure(self, one: ShapeSetting, runs: int, steps: int) -> None:
        """Take a prompt in so many times, or draw keys, and tokens behind the last."""
        sizes: dict[str, Any] = {} if one.dense else {"budget": one.budget, "dense_layers": one.dense_layers}
        spent: defaultdict[str, float] = defaultdict(float)
        with host_times(spent):
            for run in range(runs):
                with attach(self.model, one.method, prefill_chunk=self.chunk, **sizes) as handle:
                    found = self.prompt(handle, one, run, last=run == runs - 1)
                    if run == runs - 1:
                        until = {"fill_s": None, "ttft_s": found["seconds"], "tt2t_s": found["tt2t_s"]}
                        self.decode(handle.cache, one, until, steps, spent)
                del handle
                free()
            if not runs:
                cache, begin = self.bench.cache(one), time.perf_counter()
                fill(cache, lambda number: drawn(self.model, number, one.length, one.seed), coming=2 * (steps + WARM))
                until = {"fill_s": time.perf_counter() - begin, "ttft_s": None, "tt2t_s": None}
                self.decode(cache, one, until, steps, spent)
                del cache
                free()

    def prompt(self, handle: Handle, one: ShapeSetting, run: int, *, last: bool) -> dict[str, Any]:
        """Take a prompt and one token behind it."""
        ids = random_ids(self.model, 1, one.length, seed=one.length)
        begin = now(self.model.device)
        self.model(ids, logits_to_keep=1)
        found: dict[str, Any] = {"seconds": now(self.model.device) - begin, "indexed_s": None}
        if not last:
            handle.cache.wait()
            found["indexed_s"] = now(self.model.device) - begin
        alone = [updater for _, updater in updaters(handle.cache.kv.offloaded)]
        self.model(ids[:, -1:], past_key_values=handle.cache)
        found["tt2t_s"] = now(self.model.device) - begin
        found["index_alone_s"] = build_alone(alone) if run and last else None
        sizes: dict[str, Any] = {"budget": one.budget, "retrieved": one.retrieved}
        asked = PrefillSetting(
            shape=self.shape, method=one.method, length=one.length, chunk=self.chunk, **sizes,
            dense_layers=one.dense_layers, device=one.device, layers=self.layers or None,
        )  # fmt: skip
        self.say("prefill", asdict(asked), {**found, "runs_before": run})
        return found

    def decode(
        self, cache: DynamicCache, one: ShapeSetting, until: dict[str, Any], steps: int, spent: defaultdict[str, float]
    ) -> None:
        """Take steps on a cache that has its tokens."""
        captured = replace(one, steps="captured")
        one = captured if possible(captured, one.device != "cpu") else one
        tokens, capture = random_tokens(self.model, 1, one.seed), one.steps == "captured"
        indexes = [updater.retriever.index for _, updater in updaters(cache.kv.offloaded)] if isinstance(cache, Cache) else []
        while any(isinstance(index, PagedTreeIndex) and index.pages.writing for index in indexes):
            time.sleep(0.01)
        if steps:
            take(self.model, cache, tokens, 1, WARM, capture=capture)
            spent.clear()
            taken = take(self.model, cache, tokens, steps, 0, capture=capture)
            parts = {"host_ms": {name: 1e3 * seconds / steps for name, seconds in spent.items()}, "huge_bytes": huge_bytes()}
            setting = one.to_dict() | ({"layers": self.layers} if self.layers else {})
            self.say("decode", setting, {**until, **self.bench.taken(one, cache, taken), **parts})


def huge_bytes() -> int | None:
    """Return how much of this process's memory lies in huge pages; None where the system does not tell."""
    try:
        found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


@registered()
def main() -> None:
    """See the module."""
    given = options(
        __doc__, shape="llama-3.1-8b", prompts="2xfull/36864,3xicecache/36864,2xicecache-digest/36864@64", chunk=16384, budget=256,
        dense_layers=2, out=Path, commit=str,
    )  # fmt: skip
    report = Report(given.out, given.commit)

    def say(kind: str, setting: dict[str, Any], found: dict[str, Any]) -> None:
        report.record(setting, {"bench": kind, **found})

    prompts = Prompts(given.shape, given.chunk, ShapeBench(ResultsFile(None), commit=given.commit), say)
    for prompt in given.prompts.split(","):
        asked = ASKED.fullmatch(prompt)
        if asked is None:
            raise ConfigError(f"prompts has {prompt!r}; it must be [RUNSx]METHOD/LENGTH[/LAYERS][@STEPS]")
        runs, (length, layers, steps) = int(asked[1] or 1), (int(asked[i] or 0) for i in (3, 4, 5))
        prompts.prepare(layers)
        sizes = {"budget": given.budget, "retrieved": None, "dense_layers": given.dense_layers, "new_tokens": steps or 2}
        device, start = where()[1], {} if runs else {"prompt": "filled"}
        one = setting(
            asked[2], shape=given.shape, steps="eager", length=length, batch=1, seed=0, device=device, **sizes, **start
        )
        try:
            prompts.measure(one, runs, steps)
        except (RuntimeError, KvthawError) as error:  # the others' times are not lost for it
            noted(f"failed: {prompt}: {type(error).__name__}: {error}")
            free()


if __name__ == "__main__":
    run_as_script(main)
