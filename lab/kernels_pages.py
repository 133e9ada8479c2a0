"""The kernels of ClusterKV, Quest, ArkVale and PRKV: each checked against its definition with new random inputs, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.index.clusters import first_keys
from kvthaw.index.hybrid import HybridIndex
from kvthaw.index.reordering import choose_static
from kvthaw.kernels import kmeans, observe, page_bounds, unit_scores, unit_select
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from lab.kernels import (
    DIM,
    GROUP,
    HEADS,
    SHAPE,
    agree,
    copies,
    demand,
    differing,
    eager_time,
    micros,
    rates,
    replay_time,
    rotated,
)
from lab.script import run_kernels

ROWS = 1024
_METHODS = {"clusterkv-plus": 32, "clusterkv": 80, "prkv": 32, "arkvale": 32, "quest": 16}  # tokens a unit


@dataclass(slots=True)
class Tables:
    """A method's tables for sequences of so many tokens, filled at random."""

    digests: Tensor
    stops: Tensor
    order: Tensor | None
    counts: Tensor

    def select(self, query: Tensor, policy: Policy, run: Callable[..., Any] = unit_select.unit_select) -> tuple[Tensor, Tensor]:
        """Rows as the method's index would select them."""
        how: dict[str, Any] = {"first": 16, "budget": ROWS, "scale": DIM**-0.5, "policy": policy}
        rows, counts = run(query, self.digests, self.stops, self.order, self.counts, **how)
        return rows, counts


def tables(method: str, tokens: int, batch: int, device: torch.device) -> Tables:
    size, static, clusters = _METHODS[method], ROWS // 4 if method == "prkv" else 0, method.startswith("clusterkv")
    units = (tokens - static) // size
    width = DIM if clusters else 2 * DIM
    digests = torch.randn(batch, HEADS, units, width, device=device)
    digests[..., DIM:].abs_()
    if clusters:  # sizes as random assignment gives them, some of them 0
        stops = torch.randint(units * size + 1, (batch, HEADS, units - 1), device=device).sort(dim=2).values
        ends = torch.nn.functional.pad(torch.nn.functional.pad(stops, (1, 0)), (0, 1), value=units * size)
    else:
        ends = (static + size * torch.arange(units + 1, device=device)).expand(batch, HEADS, -1)
    order = None
    if clusters or method == "prkv":
        order = torch.rand(batch, HEADS, tokens, device=device).argsort(dim=2).int() + 16
    counts = torch.full((batch,), units, dtype=torch.int32, device=device)
    return Tables(digests.bfloat16(), ends.int().contiguous(), order, counts)


def window(batch: int, device: torch.device) -> RecentQueries:
    """PRKV's observation window, empty."""
    queries = torch.zeros(batch, HEADS * GROUP, 64, DIM, dtype=torch.bfloat16, device=device)
    return RecentQueries(queries, torch.zeros(batch, 64, device=device), torch.zeros(1, dtype=torch.int64, device=device))


def first_of_prompt(keys: Tensor, count: int) -> Tensor:
    """The keys [H, T, D] that a prompt's `count` clusters begin with."""
    positions, heads = (torch.arange(n, device=keys.device) for n in (keys.shape[1], keys.shape[0]))
    return kmeans.whole(first_keys(keys, positions, count, start="covering", streams=heads[:, None]))


def select_time(method: str, tokens: int, batch: int) -> dict[str, Any]:
    """select on digests that are not in the L2 cache, beside the same in plain torch."""
    made = tables(method, tokens, batch, torch.device("cuda"))
    query = torch.randn(batch, HEADS * GROUP, DIM, device="cuda").bfloat16()
    units, others = made.digests.shape[2], range(1, copies(made.digests.nbytes))
    sets = [made] + [Tables(made.digests.clone(), made.stops, made.order, made.counts) for _ in others]

    def all_sets(run: Callable[..., Any]) -> list[Callable[[], object]]:
        return rotated(lambda one: one.select(query, "max", run), sets)

    per_unit = batch * HEADS * units
    moved = made.digests.nbytes + per_unit * (4 + 4 * GROUP * 2 + 4 * 4) + batch * HEADS * ROWS * 8
    launch = partial(unit_select.launch, recent=window(batch, query.device)) if method == "prkv" else unit_select.launch
    rows, counts = made.select(query, "max", launch)
    demand(torch.equal(made.select(query, "max", launch)[0], rows), f"{method} select differs from run to run")
    if batch == 1:  # the definition takes too much memory for more
        want, want_counts = made.select(query, "max", unit_select.definition)
        demand(torch.equal(counts, want_counts), f"{method} select brings another number of rows")
        other = differing(rows, want)
        demand(other <= 4 * _METHODS[method], f"{method} select: {other} rows differ from the definition's")
    seconds = replay_time(all_sets(launch))  # as in a step: PRKV's notes the query
    how: dict[str, Any] = {"scale": DIM**-0.5, "mean": False}
    scoring = replay_time([partial(unit_scores.launch, query, t.digests, t.stops, t.counts, **how) for t in sets])
    line = {"op": "select", "method": method, "tokens": tokens, "batch": batch, "rows": ROWS, "units": units}
    line |= rates(seconds, moved) | {"scores_us": micros(scoring)}
    if batch == 1:
        line["torch_us"] = micros(replay_time(all_sets(unit_select.definition)[:2], 5))
    return line


def parts(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of device time by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 1000 for event in seen.key_averages()}
    longest = sorted(spent.items(), key=lambda item: -item[1])[:8]
    return {name[:60]: round(ms, 3) for name, ms in longest if ms > 0}


def kmeans_time(method: str, tokens: int, *, iterations: int) -> dict[str, Any]:
    """A prompt's clusters, with the keys that they begin with. Random keys do not converge, so all iterations are made."""
    keys = torch.randn(HEADS, tokens, DIM, device="cuda").bfloat16()
    count = tokens // _METHODS[method]
    start = first_of_prompt(keys, count)

    def clusters(start: Tensor) -> kmeans.Clusters:
        return kmeans.whole(kmeans.launch_in_pieces(keys, start, distance="cosine", iterations=iterations))

    def call() -> object:
        return clusters(first_of_prompt(keys, count))

    _, order, stops = clusters(start)
    whole = torch.arange(tokens, device="cuda", dtype=torch.int32).expand(HEADS, -1)
    demand(torch.equal(order.sort(dim=1).values, whole), "k-means' clusters are not a partition")
    demand(bool((stops.diff(dim=1) >= 0).all()) and bool((stops[:, -1] == tokens).all()), "k-means' stops are not in order")
    seconds, first = eager_time(call), eager_time(lambda: first_of_prompt(keys, count))
    plain = eager_time(lambda: kmeans.whole(kmeans.definition_in_pieces(keys, start, distance="cosine", iterations=1)), 2)
    work = 2 * HEADS * tokens * count * DIM * iterations
    return {
        "op": "kmeans",
        "method": method,
        "tokens": tokens,
        "clusters": count,
        "iterations": iterations,
        "ms": round(seconds * 1e3, 3),
        "tflops": round(work / (seconds - first) / 1e12, 1),
        "start_ms": round(first * 1e3, 3),
        "torch_ms": round(plain * iterations * 1e3, 1),
        "kernels_ms": parts(call),
    }


def refresh_time(tokens: int) -> dict[str, Any]:
    """PRKV's refresh of a layer: keys from the host, static set, pages; the whole and its parts."""
    device = torch.device("cuda")
    store = HostStore(1, HEADS, DIM, torch.bfloat16, pinned=True)
    for _ in range(tokens // 8192):
        store.append(0, torch.randn(HEADS, 8192, 2, DIM).bfloat16())
    sizes = (0, HEADS * GROUP, HEADS, DIM, torch.bfloat16, device)
    index = HybridIndex(IndexContext(*sizes, store, Regions(0, 64, 32), DIM**-0.5))
    index.rows = ROWS
    index.reserve(1)
    index.queries.normal_()
    index.seen.fill_(1.0)
    windows = index.windows([0])
    window = [tensor[0] for tensor in windows]
    keys = store.read_keys(0, 0, tokens, device)
    mass = observe.launch(window[0], keys, window[1], scale=DIM**-0.5)
    rest = choose_static(mass, ROWS // 4, 0)[:, ROWS // 4 :].long().contiguous()
    agree(mass, observe.definition(window[0], keys, window[1], scale=DIM**-0.5), "observe", 1e-3)
    bounds, want = (f(keys, 32, spread="mean", order=rest) for f in (page_bounds.launch, page_bounds.definition))
    agree(bounds, want, "page_bounds")
    steps: dict[str, Callable[[], object]] = {
        "stream": lambda: store.read_keys(0, 0, tokens, device),
        "observe": lambda: observe.launch(window[0], keys, window[1], scale=DIM**-0.5),
        "order": lambda: choose_static(mass, ROWS // 4, 0),
        "bounds": lambda: page_bounds.launch(keys, 32, spread="mean", order=rest),
        "torch_observe": lambda: observe.definition(window[0], keys, window[1], scale=DIM**-0.5),
        "torch_bounds": lambda: page_bounds.definition(keys, 32, spread="mean", order=rest),
    }
    whole = eager_time(lambda: index.reorderings([0], index.read(0, tokens), *windows))
    times = {f"{name}_ms": round(eager_time(step) * 1e3, 3) for name, step in steps.items()}
    line = {
        "op": "refresh",
        "method": "prkv",
        "tokens": tokens,
        "ms": round(whole * 1e3, 3),
        "a_step_ms": round(whole * 1e3 / 128, 4),
    }
    return line | {"stream_gbps": round(keys.nbytes / times["stream_ms"] / 1e6, 1)} | times


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for tokens in (1 << 17,) if quick else (1 << 17, 1 << 20):
        for batch in (1,) if quick else (1, 4):
            for method in _METHODS:
                yield select_time(method, tokens, batch)
    for tokens in (1 << 17,) if quick else (1 << 15, 1 << 17):
        for method, iterations in (("clusterkv-plus", 8), ("clusterkv", 8), ("clusterkv", 20)):
            yield kmeans_time(method, tokens, iterations=iterations)
        yield refresh_time(tokens)


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE)
