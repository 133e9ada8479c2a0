"""ParisKV's kernels: each checked against its definition with new random inputs, then timed as replays of a CUDA graph."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw.bench.card import emit, provenance
from kvthaw.bench.kernels_decode import replay_time
from kvthaw.cache.host import HostStore
from kvthaw.cache.regions import Regions
from kvthaw.errors import CacheError
from kvthaw.index.codes import CodesIndex, Policy
from kvthaw.index.ratios import Ratios
from kvthaw.kernels import bucket_topk as bucket
from kvthaw.kernels import collide as collision
from kvthaw.kernels import encode as encoding
from kvthaw.kernels import rerank as reranking
from kvthaw.kernels import tiers as tiering
from kvthaw.kernels import topk as choosing
from kvthaw.types import LayerShape

DEVICE_GBPS = 4300
"""What one H200 was measured to move, read and written."""
HEADS, GROUP, DIM, SINK, K = 8, 4, 128, 128, 100
_COLD = 256 << 20  # bytes to pass over before ids may be read again: four times the L2 cache
_BASE: dict[str, Any] = {"bench": "kernels", "method": "pariskv", "kv_heads": HEADS, "group": GROUP, "head_dim": DIM, "rows": K}


def main(*, quick: bool = False, out: Path | None = None, commit: str | None = None) -> list[dict[str, Any]]:
    """Check, measure and print a JSON line a case; quick: fewer and shorter ones. Raises CacheError where a kernel is wrong."""
    if not torch.cuda.is_available():
        raise CacheError("timing kernels needs a CUDA device; their definitions and checks run in the tests without one")
    torch.manual_seed(time.time_ns() % (1 << 31))
    card, lines = provenance(commit), []

    def report(line: dict[str, Any]) -> None:
        line = {**_BASE, **line, **card}
        emit(line, out)
        lines.append(line)

    with torch.inference_mode():
        for policy in ("max", "mean", "mean_query"):
            report({"op": "check", "policy": policy, **check(policy)})
        report(encode_time(1 << 17))
        for tokens, batch in (
            [(1 << 17, 1)] if quick else [(1 << 17, 1), (1 << 19, 1), (1 << 20, 1), (1 << 17, 4), (1 << 17, 16)]
        ):
            for line in steps(tokens, batch, with_torch=batch == 1):
                report(line)
        for tokens, batch in [] if quick else [(1 << 19, 4), (1 << 20, 4), (1 << 19, 16), (1 << 20, 16)]:
            for line in steps(tokens, batch, with_torch=False):
                report(line)
        report(select_time("mean_query", 1 << 17))
        report(select_time("mean", 1 << 17))
    return lines


def make(batch: int, tokens: int, policy: Policy = "max", *, ragged: bool = False) -> CodesIndex:
    """An index of random keys; ragged: of lanes that differ in length."""
    device = torch.device("cuda")
    store = HostStore(batch, HEADS, DIM, torch.bfloat16)
    sizes = (0, HEADS * GROUP, HEADS, DIM, torch.bfloat16, device)
    index = CodesIndex(LayerShape(*sizes, store, Regions(SINK, 256, 512), DIM**-0.5), policy=policy)
    index._reserve(batch, tokens)
    for lane in range(batch):
        n = tokens - lane * 777 if ragged else tokens
        keys = torch.randn(HEADS, n, DIM, device=device, dtype=torch.bfloat16)
        index.build(lane, SINK, keys, keys, keys[:, :0])
    return index


def queries(batch: int) -> Tensor:
    return torch.randn(batch, HEADS * GROUP, DIM, device="cuda").bfloat16() * 2


def check(policy: Policy, tokens: int = 40_000) -> dict[str, Any]:
    """Every kernel against its definition, on two lanes of different lengths; figures of how far they differ."""
    index, query = make(2, tokens, policy, ragged=True), queries(2)
    now, data, mean = index._summaries, index._data, policy == "mean_query"
    lengths, wanted = data["lengths"], data["wanted"]
    found = Ratios()
    index.select(query, K)
    keys = torch.randn(1, HEADS, 1000, DIM, device="cuda", dtype=torch.bfloat16)
    trial = encoding.Summaries(*(x.clone() for x in (now.ids, now.codes, now.weights, now.sizes)))
    encoding.launch(keys, index._rotation, index._quantizer, trial, [1], [17])
    ids, codes, weights = encoding.definition(keys[0], index._rotation, index._quantizer)
    differ = {
        "ids": (trial.ids[1, :, :, 17:1017] != ids).float().mean(),
        "codes": (trial.codes[1, :, 17:1017] != codes).float().mean(),
        "weights": ((trial.weights[1, :, 17:1017].float() - weights.float()).abs() > 2**-7 * weights.float()).float().mean(),
    }
    for name, share in differ.items():
        _demand(float(share) < 1e-3, f"encode: {float(share):.5f} of the {name} differ")
    for lane, n in enumerate(index._counts):
        flat = now.ids[lane, :, :, :n].long()
        counted = torch.zeros_like(now.sizes[lane]).scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.int32))
        _demand(torch.equal(counted, now.sizes[lane]), "count: cluster sizes differ")
    totals = torch.full((2, HEADS, index._bins), 99, dtype=torch.int32, device="cuda")
    rotated, table = tiering.launch(
        query, index._rotation, now.sizes, data["limits"], totals, mean=mean, combine=index._combine
    )
    want = tiering.rotate_queries(query, HEADS, index._rotation, mean=mean)
    _demand(float((rotated - want).norm() / want.norm()) < 1e-5, "tiers: rotated queries differ")
    votes = tiering.definition(tiering.similarities(rotated), now.sizes, data["limits"])
    _demand(torch.equal(table, tiering.pack(votes, index._combine)), "tiers: votes differ")
    scores = collision.definition(table, now.ids, index._combine)
    for shared in (True, False):
        got = collision.launch(table, now.ids, lengths, totals.zero_(), index._combine, shared=shared)
        for lane, n in enumerate(index._counts):
            _demand(
                torch.equal(got.scores[lane, :, :n].int(), scores[lane, :, :n]), f"collide: scores differ (shared={shared})"
            )
    width = -(-found.most(now.capacity, K) // reranking.TILE) * reranking.TILE
    chosen = bucket.launch(got, lengths, wanted, width)
    candidates = bucket.by_counting(got.scores, lengths, wanted, width, index._bins)
    known = torch.arange(width, device="cuda") < wanted[:, None, None]
    _demand(torch.equal(chosen.masked_fill(~known, -1), candidates), "bucket_topk: candidates differ")
    estimate = reranking.definition(rotated, now.codes, now.weights, candidates, index._quantizer)
    made = reranking.launch(rotated, now, chosen, wanted, index._quantizer, DIM**-0.5)
    gap = (made.scores - estimate).masked_fill(~known[:, :, None], 0.0).norm() / estimate.masked_fill(
        ~known[:, :, None], 0.0
    ).norm()
    _demand(float(gap) < 1e-4, f"rerank: estimates differ by {float(gap):.6f} of their norm")
    rows, counts = choosing.launch(made, chosen, wanted, K, SINK, DIM**-0.5, index._merge)
    merged = choosing.merge(estimate, DIM**-0.5, index._merge)
    best, want_counts = choosing.definition(merged, candidates, K, SINK)
    missed = torch.stack([(~torch.isin(a, b)).sum() for a, b in zip(rows.flatten(0, 1), best.flatten(0, 1), strict=True)])
    _demand(torch.equal(counts, want_counts) and int(missed.max()) <= 1, f"topk: {missed.tolist()} rows differ")
    whole = index.select(query, K)
    _demand(torch.equal(whole.rows, rows), "select: rows differ from those of its steps")
    _demand(torch.equal(index.select(query, K).rows, rows), "select: rows differ from run to run")
    return {name: float(share) for name, share in differ.items()} | {"estimates": float(gap), "rows": int(missed.sum())}


def encode_time(tokens: int) -> dict[str, Any]:
    """Encoding and counting all keys of a prompt."""
    index = make(1, tokens)
    keys = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        encoding.launch(keys, index._rotation, index._quantizer, index._summaries, [0], [0])

    which = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0], [0])]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(12):  # it copies its lanes from the host, so not as a graph
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)
        begin.record()
        call()
        encoding.launch_count(index._summaries, [0], [0], [tokens])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    del which
    moved = keys.nbytes + HEADS * tokens * (112 + 16)
    return {"op": "encode", "tokens": tokens, "batch": 1, **_rates(sorted(times)[len(times) // 2], moved)}


def steps(tokens: int, batch: int, *, with_torch: bool) -> list[dict[str, Any]]:
    """Each step of select, and the whole, on enough copies of the index that none is still cached when its turn comes."""
    index, query, scale = make(batch, tokens), queries(batch), DIM**-0.5
    index.select(query, K)
    data, now = index._data, index._summaries
    lengths, wanted = data["lengths"], data["wanted"]
    count = max(1, -(-_COLD // now.ids.nbytes))
    sets = [now] + [
        encoding.Summaries(*(x.clone() for x in (now.ids, now.codes, now.weights, now.sizes))) for _ in range(count - 1)
    ]
    width = -(-index.ratios.most(now.capacity, K) // reranking.TILE) * reranking.TILE
    totals = torch.empty((batch, HEADS, index._bins), dtype=torch.int32, device="cuda")
    how: dict[str, Any] = {"mean": False, "combine": "max"}
    rotated, table = tiering.launch(query, index._rotation, now.sizes, data["limits"], totals, **how)
    got = collision.launch(table, now.ids, lengths, totals.clone(), "max")
    chosen = bucket.launch(got, lengths, wanted, width)
    made = reranking.launch(rotated, now, chosen, wanted, index._quantizer, scale)

    def select(one: encoding.Summaries) -> object:
        index._summaries = one
        return index.select(query, K)

    keys, picked = batch * HEADS * tokens, batch * HEADS * int(wanted[0])
    want = int(wanted[0])
    scores, real, estimates = got.scores[:, :, :tokens].contiguous(), chosen[:, :, :want].contiguous(), made.scores[..., :want]
    ours: dict[str, tuple[Callable[[encoding.Summaries], object], int]] = {
        "tiers": (
            lambda one: tiering.launch(query, index._rotation, one.sizes, data["limits"], totals, **how),
            query.nbytes + now.sizes.nbytes + rotated.nbytes + table.nbytes,
        ),
        "collide": (lambda one: collision.launch(table, one.ids, lengths, totals, "max"), keys * 17),
        "collide_cached": (lambda one: collision.launch(table, one.ids, lengths, totals, "max", shared=False), keys * 17),
        "bucket_topk": (lambda one: bucket.launch(got, lengths, wanted, width), keys + 4 * picked),
        "rerank": (
            lambda one: reranking.launch(rotated, one, chosen, wanted, index._quantizer, scale),
            picked * (100 + 4 * GROUP),
        ),
        "topk": (lambda one: choosing.launch(made, chosen, wanted, K, SINK, scale, "max"), picked * (4 + 4 * GROUP)),
        "select": (select, keys * 18 + picked * (112 + 8 * GROUP)),
    }
    plain: dict[str, Callable[[encoding.Summaries], object]] = {
        "tiers": lambda one: tiering.definition(tiering.similarities(rotated), one.sizes, data["limits"]),
        "collide": lambda one: collision.definition(table, one.ids, "max"),
        "bucket_topk": lambda one: torch.topk(scores.int(), want, dim=2),
        "rerank": lambda one: reranking.definition(rotated, one.codes, one.weights, real, index._quantizer),
        "topk": lambda one: torch.topk(choosing.merge(estimates, scale, "max"), K, dim=2),
    }
    lines = []
    for name, (call, moved) in ours.items():
        line = {"op": name, "tokens": tokens, "batch": batch, **_rates(replay_time(_calls(call, sets), 20), moved)}
        if with_torch and name in plain:
            theirs = replay_time(_calls(plain[name], sets[:2]), 5)
            line |= {"torch_us": round(theirs * 1e6, 2), "speedup": round(theirs * 1e6 / line["us"], 1)}
        lines.append(line)
    index._summaries = now
    return lines


def select_time(policy: Policy, tokens: int) -> dict[str, Any]:
    """The whole of select under another policy."""
    index, query = make(1, tokens, policy), queries(1)
    index.select(query, K)
    seconds = replay_time([lambda: index.select(query, K)] * 8, 20)
    return {"op": "select", "policy": policy, "cached": True, "tokens": tokens, "batch": 1, "us": round(seconds * 1e6, 2)}


def _calls(call: Callable[[encoding.Summaries], object], sets: Sequence[encoding.Summaries]) -> list[Callable[[], object]]:
    def on(one: encoding.Summaries) -> Callable[[], object]:
        return lambda: call(one)

    return [on(sets[i % len(sets)]) for i in range(max(4, len(sets)))]


def _rates(seconds: float, moved: int) -> dict[str, Any]:
    speed = moved / seconds / 1e9
    return {"us": round(seconds * 1e6, 2), "bytes": moved, "gbps": round(speed, 1), "share": round(speed / DEVICE_GBPS, 3)}


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise CacheError(message)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines; there is no other form")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="what the lines name as the commit")
    given = parser.parse_args()
    main(quick=given.quick, out=given.out, commit=given.commit)
