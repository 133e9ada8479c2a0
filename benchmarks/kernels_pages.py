"""The kernels of ClusterKV, Quest, ArkVale and PRKV: each checked against its definition with new random inputs, then timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_decode import DEVICE_GBPS, DIM, GROUP, HEADS, agree, rates, replay_time
from benchmarks.script import Report, run_kernels
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import CacheError
from kvthaw.index.clusters import drawn, first_keys
from kvthaw.index.hybrid import HybridIndex, choose_static
from kvthaw.kernels import HAS_TRITON, cover, kmeans, observe, page_bounds, unit_scores, unit_select
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions

ROWS = 1024
_COLD = 256 << 20  # bytes to pass over before digests may be read again: four times the L2 cache
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


def tables(method: str, tokens: int, batch: int, device: torch.device, *, ragged: bool = False) -> Tables:
    """ragged: sequences of different lengths, whose tables hold NaN and nonsense behind their ends."""
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
    made = Tables(digests.bfloat16(), ends.int().contiguous(), order, counts)
    if ragged:
        for seq in range(batch):
            n = units - seq * (units // (batch + 1)) - 3
            counts[seq] = n
            made.digests[seq, :, n:] = torch.nan
            made.stops[seq, :, n + 1 :] = -7
    return made


def check(device: torch.device, tokens: int = 40_000) -> list[dict[str, Any]]:
    """Every kernel against its definition. Raises CacheError where one differs."""
    lines: list[dict[str, Any]] = []
    for method in _METHODS:
        made = tables(method, tokens, 3, device, ragged=True)
        query = (2 * torch.randn(3, HEADS * GROUP, DIM, device=device)).bfloat16()
        policies: tuple[Policy, ...] = ("max", "mean", "mean_query")
        for policy in policies:
            (rows, counts), (want, want_counts) = (
                made.select(query, policy, f) for f in (unit_select.launch, unit_select.definition)
            )
            again, _ = made.select(query, policy, unit_select.launch)
            demand(torch.equal(again, rows), f"{method} select differs from run to run")
            demand(torch.equal(counts, want_counts), f"{method} select brings another number of rows")
            pairs = zip(rows.flatten(0, 1), want.flatten(0, 1), strict=True)
            other = max(int((~torch.isin(a, b)).sum()) for a, b in pairs)
            demand(other <= 4 * _METHODS[method], f"{method} select by {policy}: {other} rows differ from the definition's")
            lines.append({"op": "check select", "method": method, "policy": policy, "rows_differ": other})
    watch, plain = window(3, device), window(3, device)
    for _ in range(3):
        query = torch.randn(3, HEADS * GROUP, DIM, device=device).bfloat16()
        rows, _ = made.select(query, "max", partial(unit_select.launch, recent=watch))
        plain.record(query)
        same = [(watch.queries, plain.queries), (watch.seen, plain.seen), (watch.steps, plain.steps)]
        demand(all(torch.equal(a, b) for a, b in same), "a window of queries is not what its definition makes of it")
        demand(torch.equal(rows, made.select(query, "max", unit_select.launch)[0]), "select with a window brings other rows")
    lines.append({"op": "check watch"})
    many = Tables(torch.randn(1, HEADS, tokens, DIM, device=device).bfloat16(), *single(tokens, device))
    query = torch.randn(1, HEADS * GROUP, DIM, device=device).bfloat16()
    (rows, _), (want, _) = (many.select(query, "max", f) for f in (unit_select.launch, unit_select.definition))
    other = max(int((~torch.isin(a, b)).sum()) for a, b in zip(rows[0], want[0], strict=True))
    demand(other <= 8, f"select among single tokens: {other} rows differ from the definition's")
    lines.append({"op": "check select", "method": "single tokens", "policy": "max", "rows_differ": other})
    keys = torch.randn(HEADS, tokens, DIM, device=device).bfloat16()
    spreads: tuple[page_bounds.Spread, ...] = ("max", "mean")
    for spread in spreads:
        order = torch.stack([torch.randperm(tokens, device=device) for _ in range(HEADS)])
        got, want = (f(keys, 32, spread=spread, order=order) for f in (page_bounds.launch, page_bounds.definition))
        lines.append({"op": "check page_bounds", "spread": spread, "error": agree(got, want, "page_bounds")})
    queries, weights = keys[:, -256:].contiguous(), torch.rand(256, device=device)
    got, want = (f(queries, keys, weights, scale=DIM**-0.5) for f in (observe.launch, observe.definition))
    lines.append({"op": "check observe", "error": agree(got, want, "observe", 1e-3)})
    lines.append({"op": "check cover", "error": check_cover(keys)})
    lines.append({"op": "check kmeans", **check_kmeans(keys)})
    store = HostStore(1, HEADS, DIM, torch.bfloat16, pinned=device.type == "cuda")
    store.append(0, torch.stack((keys, keys), dim=2).cpu())
    streamed = store.read_keys(0, 5, tokens - 7, device)
    demand(torch.equal(streamed, keys[:, 5 : tokens - 7]), "stream_keys brought other keys")
    lines.append({"op": "check stream_keys"})
    return lines


def window(batch: int, device: torch.device) -> RecentQueries:
    """PRKV's observation window, empty."""
    queries = torch.zeros(batch, HEADS * GROUP, 64, DIM, dtype=torch.bfloat16, device=device)
    return RecentQueries(queries, torch.zeros(batch, 64, device=device), torch.zeros(1, dtype=torch.int64, device=device))


def single(tokens: int, device: torch.device) -> tuple[Tensor, None, Tensor]:
    """Stops, order and counts of units of one token each: chunks leave more of them than the last kernel has registers for."""
    stops = torch.arange(tokens + 1, dtype=torch.int32, device=device).expand(1, HEADS, -1).contiguous()
    return stops, None, torch.full((1,), tokens, dtype=torch.int32, device=device)


def heads_of(keys: Tensor) -> Tensor:
    """The numbers of the heads of keys [H, T, D], as `drawn` takes them."""
    return torch.arange(keys.shape[0], device=keys.device)[:, None]


def first_of_prompt(keys: Tensor, count: int) -> Tensor:
    """The keys [H, T, D] that a prompt's `count` clusters begin with."""
    positions = torch.arange(keys.shape[1], device=keys.device)
    return first_keys(keys, positions, count, start="covering", streams=heads_of(keys))


def check_cover(keys: Tensor) -> float:
    """How well a prompt's drawn keys cover it, in two rounds; and a start of keys none of which is taken twice."""
    got, want = (torch.full(keys.shape[:2], -torch.inf, device=keys.device) for _ in range(2))
    count = max(4, keys.shape[1] // 80)
    centres = drawn(torch.arange(keys.shape[1], device=keys.device), count, heads_of(keys))
    for part in centres.tensor_split(2, dim=1):
        cover.launch(got, keys, part)
    cover.definition(want, keys, centres)
    start, again = first_of_prompt(keys, count), first_of_prompt(keys, count)
    demand(torch.equal(start, again), "the start differs from run to run")
    demand(bool((start.diff(dim=1) > 0).all()), "the start takes a key twice")
    return agree(got, want, "cover", 1e-2)


def check_kmeans(keys: Tensor) -> dict[str, Any]:
    """k-means of keys [H, T, D]: clusters that are a partition, means that are theirs, and as near as the definition's."""
    heads, tokens = keys.shape[:2]
    count = max(2, tokens // 80)
    start = first_of_prompt(keys, count)
    means, order, stops = kmeans.launch(keys, start, distance="cosine", iterations=5)
    again = kmeans.launch(keys, start, distance="cosine", iterations=5)
    demand(all(torch.equal(a, b) for a, b in zip(again, (means, order, stops), strict=True)), "k-means differs from run to run")
    whole = torch.arange(tokens, device=keys.device, dtype=torch.int32).expand(heads, -1)
    demand(torch.equal(order.sort(dim=1).values, whole), "k-means' clusters are not a partition")
    sizes = stops.diff(dim=1)
    demand(bool((sizes >= 0).all()) and bool((stops[:, -1] == tokens).all()), "k-means' stops are not in order")
    labels = labels_of(order, stops)
    sums = torch.zeros_like(means).scatter_add_(1, labels[:, :, None].expand_as(keys), keys.float())
    filled = sizes > 0
    error = agree(means[filled], (sums / sizes[..., None].clamp(min=1))[filled], "a cluster's mean", 1e-4)
    theirs = kmeans.definition(keys, start, distance="cosine", iterations=5)
    near = [cosine(keys, *each) for each in ((means, labels), (theirs[0], labels_of(*theirs[1:])))]
    demand(abs(near[0] - near[1]) < 2e-3 * abs(near[1]), f"k-means: mean cosine {near[0]:.5f}, the definition's {near[1]:.5f}")
    return {"mean_error": error, "cosine": round(near[0], 5), "cosine_of_definition": round(near[1], 5)}


def labels_of(order: Tensor, stops: Tensor) -> Tensor:
    """The cluster of each key [H, T], of clusters order[stops[c] : stops[c + 1]]."""
    place = torch.arange(order.shape[1], device=order.device, dtype=torch.int32).expand(len(order), -1).contiguous()
    labels = torch.searchsorted(stops[:, 1:].contiguous(), place, right=True)
    return torch.empty_like(labels).scatter_(1, order.long(), labels)


def cosine(keys: Tensor, means: Tensor, labels: Tensor) -> float:
    """Mean cosine of keys and the means of their clusters."""
    own = means.gather(1, labels[:, :, None].expand_as(keys))
    return float(torch.nn.functional.cosine_similarity(keys.float(), own, dim=2).mean())


def select_time(method: str, tokens: int, batch: int) -> dict[str, Any]:
    """select on digests that are not in the L2 cache, beside the same in plain torch."""
    made = tables(method, tokens, batch, torch.device("cuda"))
    query = torch.randn(batch, HEADS * GROUP, DIM, device="cuda").bfloat16()
    units, copies = made.digests.shape[2], max(1, math.ceil(_COLD / made.digests.nbytes))
    sets = [made] + [Tables(made.digests.clone(), made.stops, made.order, made.counts) for _ in range(copies - 1)]

    def all_sets(run: Callable[..., Any]) -> list[Callable[[], object]]:
        return [partial(one.select, query, "max", run) for one in (sets * math.ceil(4 / len(sets)))]

    per_unit = batch * HEADS * units
    moved = made.digests.nbytes + per_unit * (4 + 4 * GROUP * 2 + 4 * 4) + batch * HEADS * ROWS * 8
    launch = partial(unit_select.launch, recent=window(batch, query.device)) if method == "prkv" else unit_select.launch
    seconds = replay_time(all_sets(launch))  # as in a step: PRKV's notes the query
    how: dict[str, Any] = {"scale": DIM**-0.5, "mean": False}
    scoring = replay_time([partial(unit_scores.launch, query, t.digests, t.stops, t.counts, **how) for t in sets])
    line = {"op": "select", "method": method, "tokens": tokens, "batch": batch, "rows": ROWS, "units": units}
    line |= rates(seconds, moved, DEVICE_GBPS) | {"scores_us": round(scoring * 1e6, 2)}
    if batch == 1:
        line["torch_us"] = round(replay_time(all_sets(unit_select.definition)[:2], 5) * 1e6, 2)
    return line


def eager_time(call: Callable[[], object], runs: int = 5) -> float:
    """Seconds of device time, the median of runs after one to warm up; for what is too long to be worth a graph."""
    call()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times)) / 1000


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

    def call() -> object:
        return kmeans.launch(keys, first_of_prompt(keys, count), distance="cosine", iterations=iterations)

    seconds, first = eager_time(call), eager_time(lambda: first_of_prompt(keys, count))
    plain = eager_time(lambda: kmeans.definition(keys, start, distance="cosine", iterations=1), 2)
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
    steps: dict[str, Callable[[], object]] = {
        "stream": lambda: store.read_keys(0, 0, tokens, device),
        "observe": lambda: observe.launch(window[0], keys, window[1], scale=DIM**-0.5),
        "order": lambda: choose_static(mass, ROWS // 4, 0),
        "bounds": lambda: page_bounds.launch(keys, 32, spread="mean", order=rest),
        "torch_observe": lambda: observe.definition(window[0], keys, window[1], scale=DIM**-0.5),
        "torch_bounds": lambda: page_bounds.definition(keys, 32, spread="mean", order=rest),
    }
    whole = eager_time(lambda: index.plan([0], index.read(0, tokens), *windows))
    times = {f"{name}_ms": round(eager_time(step) * 1e3, 3) for name, step in steps.items()}
    line = {
        "op": "refresh",
        "method": "prkv",
        "tokens": tokens,
        "ms": round(whole * 1e3, 3),
        "a_step_ms": round(whole * 1e3 / 128, 4),
    }
    return line | {"stream_gbps": round(keys.nbytes / times["stream_ms"] / 1e6, 1)} | times


def demand(holds: bool, message: str) -> None:
    """Raise CacheError unless it holds."""
    if not holds:
        raise CacheError(message)


def main(*, quick: bool = False, out: Path | None = None, commit: str | None = None) -> list[dict[str, Any]]:
    """Check, measure and print a JSON line a case; quick: fewer ones. Raises CacheError where a kernel is wrong."""
    if not torch.cuda.is_available() or not HAS_TRITON:
        raise CacheError("timing kernels needs a CUDA device and Triton; their definitions and checks run in the tests without")
    torch.manual_seed(time.time_ns() % (1 << 31))
    report = Report(out, commit, bench="kernels", kv_heads=HEADS, group=GROUP, head_dim=DIM)
    with torch.inference_mode():
        for line in check(torch.device("cuda")):
            report(line)
        for tokens in (1 << 17,) if quick else (1 << 17, 1 << 20):
            for batch in (1,) if quick else (1, 4):
                for method in _METHODS:
                    report(select_time(method, tokens, batch))
        for tokens in (1 << 17,) if quick else (1 << 15, 1 << 17):
            for method, iterations in (("clusterkv-plus", 8), ("clusterkv", 8), ("clusterkv", 20)):
                report(kmeans_time(method, tokens, iterations=iterations))
            report(refresh_time(tokens))
    return report.lines


if __name__ == "__main__":
    run_kernels(main, __doc__)
