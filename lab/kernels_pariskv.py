"""ParisKV's kernels: each checked against its definition with new random inputs, then timed as replays of a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.index.codes import CodesIndex, Policy
from kvthaw.kernels import bucket_topk as bucket
from kvthaw.kernels import collide as collision
from kvthaw.kernels import encode as encoding
from kvthaw.kernels import planes as rounding
from kvthaw.kernels import query as turning
from kvthaw.kernels import rerank as reranking
from kvthaw.kernels import signs as signing
from kvthaw.kernels import tiers as tiering
from kvthaw.kernels import topk as choosing
from kvthaw.regions import Regions
from lab import definitions
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
from lab.kernels_decode import decode, gather
from lab.script import run_kernels

SINK, WINDOW, BUFFER, K = 128, 256, 512, 100
GOALS = {1 << 17: 30, 1 << 19: 65, 1 << 20: 120}
"""Microseconds that select should take at batch 1, by tokens."""
Bits = Literal[3, 4]
CODED = "rerank", "select"
"""Steps of select whose time depends on the bits of the codes."""


def lines(*, quick: bool, codes: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case. With `codes` only what depends on the bits of the codes is measured."""
    yield {"op": "launch", "us": launch_time()}
    yield from coded(quick=quick)
    if codes:
        return
    yield from steps(1, quick=quick)
    for paper in (True, False):
        yield select_time("max", 1 << 17, paper=paper)
    yield select_time("mean_query", 1 << 17)
    for batch in () if quick else (4, 16):
        yield from steps(batch)


def coded(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Time both forms of codes, one after the other."""
    for bits in get_args(Bits):
        yield encode_time(1 << 17, bits)
    for tokens in (1 << 17,) if quick else GOALS:
        for bits in get_args(Bits):
            yield from Chain(1, tokens, bits=bits).times(with_torch=tokens == 1 << 17, steps=CODED)
            torch.cuda.empty_cache()


def steps(batch: int, *, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Time the steps of select, and what follows it in a decode step."""
    for tokens in (1 << 17,) if quick else GOALS:
        yield from Chain(batch, tokens).times(with_torch=batch * tokens <= 1 << 21)
        torch.cuda.empty_cache()
    line = {**gather(K, 1 << 14 if quick else 1 << 17, batch=batch), "op": "fetch"}
    yield line | ({"torch_us": fetch_in_torch(1 << 14)} if batch == 1 else {})
    yield {**decode(batch, SINK + WINDOW + BUFFER + K, masked=True), "op": "attention"}


def make(
    batch: int, tokens: int, policy: Policy = "max", *, paper: bool = False, bits: Bits = 3, device: str = "cuda"
) -> CodesIndex:
    """An index of random keys. paper: with its tiers of votes and codes of 4 bits, and keys as they are."""
    store = HostStore(batch, HEADS, DIM, torch.bfloat16)
    sizes = (0, HEADS * GROUP, HEADS, DIM, torch.bfloat16, torch.device(device))
    context = IndexContext(*sizes, store, Regions(SINK, WINDOW, BUFFER), DIM**-0.5)
    index = CodesIndex(context, policy=policy, graded=not paper, centre=not paper, code_bits=4 if paper else bits)
    index.make_room(batch, tokens)
    for seq in range(batch):
        keys = torch.randn(HEADS, tokens, DIM, device=device, dtype=torch.bfloat16)
        index.build(seq, SINK, keys, keys, keys[:, :0])
    return index


def queries(batch: int, device: str = "cuda") -> Tensor:
    return torch.randn(batch, HEADS * GROUP, DIM, device=device).bfloat16() * 2


def launch_time() -> float:
    """Microseconds of a launch that does next to nothing and waits for the one before it."""
    one = torch.zeros(1, device="cuda")
    return micros(replay_time([lambda: one.add_(1)] * 32))


def encode_time(tokens: int, bits: Bits = 3) -> dict[str, Any]:
    """Encoding all keys of a prompt, less their mean; beside it with the count of its clusters, which tiers need."""
    index = make(1, tokens, bits=bits)
    keys = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    into, how = index.summaries, (index.rotation, index.quantizer)
    encoding.launch(keys, *how, [into], [0], [0])
    ids, codes, weights = encoding.definition(keys[0], *how)
    for got, want in ((into.ids[0, :, :, :tokens], ids), (into.codes[0, :, :tokens], codes)):
        demand(float((got != want).float().mean()) < 1e-3, "encode: ids or codes differ from the definition's")
    if into.weights is not None and weights is not None:
        agree(into.weights[0, :, :tokens], weights, "encode: weights", 2**-7)

    def encode() -> None:
        encoding.launch(keys, *how, [into], [0], [0], [index.tables["centre"]] if index.centred else [])

    def counted() -> None:
        encode()
        encoding.launch_count(into, [0], [0], [tokens])

    alone, both = eager_time(encode, 12), eager_time(counted, 12)
    theirs = eager_time(lambda: encoding.definition(keys[0], *how), 12)
    moved = keys.nbytes + HEADS * tokens * (80 if bits == 3 else 112)
    line = {"op": "encode", "code_bits": bits, "tokens": tokens, "batch": 1, **rates(alone, moved), "goal_us": 300}
    return line | {"counted_us": micros(both), "torch_us": micros(theirs), "speedup": round(theirs / alone, 1)}


class Chain:
    """The steps of select, each on what the one before it left, and the whole, on enough copies of the index that none is still
    cached when its turn comes."""

    def __init__(self, batch: int, tokens: int, device: str = "cuda", bits: Bits = 3) -> None:
        self.batch, self.tokens, self.scale, self.bits_a_code = batch, tokens, DIM**-0.5, bits
        self.index, self.query = make(batch, tokens, bits=bits, device=device), queries(batch, device)
        index, data, self.now = self.index, self.index.tables, self.index.summaries
        index.select(self.query, K)
        self.lengths, self.wanted, self.limits = data["lengths"], data["wanted"], data["limits"]
        parts = self.now.ids, self.now.codes, self.now.weights, self.now.sizes
        twins: list[Any] = [[x if x is None else x.clone() for x in parts] for _ in range(1, copies(self.now.ids.nbytes))]
        self.sets = [self.now, *(encoding.Summaries(*twin) for twin in twins)]
        self.width = -(-index.ratios.most(self.now.capacity, K) // reranking.TILE) * reranking.TILE
        run = choosing.run_length(self.width, K)
        assert run is not None
        self.run = run
        self.totals = torch.zeros((batch, HEADS, collision.BINS), dtype=torch.int32, device=device)
        _, self.table = self.tiers(self.now)
        self.rotated, self.bits = self.planes(self.now)
        self.got = signing.launch(self.bits, self.now.ids, self.lengths, self.totals.clone())
        self.chosen, _ = self.bucket_topk(self.now)
        self.made = self.rerank(self.now)

    def tiers(self, one: encoding.Summaries) -> tuple[turning.Rotated, Tensor]:
        return tiering.launch(self.query, self.index.rotation, one.sizes, self.limits, self.totals, mean=False)

    def planes(self, one: encoding.Summaries) -> tuple[turning.Rotated, Tensor]:
        return rounding.launch(self.query, self.index.rotation, HEADS, self.totals, mean=False)

    def collide(self, one: encoding.Summaries) -> collision.Scores:
        return collision.launch(self.table, one.ids, self.lengths, self.totals, 0)

    def signs(self, one: encoding.Summaries) -> object:
        return signing.launch(self.bits, one.ids, self.lengths, self.totals)

    def bucket_topk(self, one: encoding.Summaries) -> tuple[Tensor, Tensor]:
        return bucket.launch(self.got, self.lengths, self.wanted, self.width)

    def rerank(self, one: encoding.Summaries) -> reranking.Estimates:
        return reranking.launch(self.rotated, one, self.chosen, self.wanted, self.index.quantizer, self.scale, self.run)

    def topk(self, one: encoding.Summaries) -> tuple[Tensor, Tensor]:
        return choosing.launch(self.made, self.chosen, self.wanted, K, SINK, self.scale, "max")

    def select(self, one: encoding.Summaries) -> object:
        self.enter(one)
        return self.index.select(self.query, K)

    def enter(self, one: encoding.Summaries) -> None:
        """Give the index other tables."""
        tables = {"ids": one.ids, "codes": one.codes, "weights": one.weights, "sizes": one.sizes}
        self.index.tables.update({name: table for name, table in tables.items() if table is not None})

    def seconds(self, step: str, replays: int = 20) -> float:
        """Of a step of this name."""
        seconds = replay_time(rotated(getattr(self, step), self.sets), replays)
        self.enter(self.now)
        return seconds

    def check(self) -> None:
        """Raise CacheError where a step differs from its definition on what the step before left."""
        index, now, n = self.index, self.now, self.tokens
        want = turning.rotate_queries(self.query, HEADS, index.rotation, mean=False)
        turned, table = self.tiers(now)
        agree(turned.values, want, "tiers: rotated queries", 1e-5)
        agree(self.rotated.rounded(), turning.in_bytes(want).rounded(), "planes: queries in bytes", 1e-3)
        votes = tiering.definition(tiering.similarities(turned.values), now.sizes, self.limits)
        demand(torch.equal(table, tiering.pack(votes)), "tiers: votes differ")
        subs = now.ids.shape[2]
        numbers = rounding.unpack(rounding.pack(rounding.coarse(self.rotated.values)), subs)
        off = float((rounding.unpack(self.bits, subs) != numbers).float().mean())
        demand(off < 0.01, f"planes: {off:.4f} of the coordinates differ")  # just about half of a step
        plain = {
            "collide": collision.definition(self.table, now.ids, 0),
            "signs": signing.definition(self.bits, now.ids),
        }
        for name, found in (("collide", self.collide(now)), ("signs", self.got)):
            demand(torch.equal(found.scores[:, :, :n].int(), plain[name][:, :, :n]), f"{name}: scores differ")
        candidates, _ = bucket.definition(self.got.scores, self.lengths, self.wanted, self.width)
        known = torch.arange(self.width, device=candidates.device) < self.wanted[:, None, None]
        demand(torch.equal(self.chosen.masked_fill(~known, -1), candidates), "bucket_topk: candidates differ")
        estimate = reranking.definition(self.rotated, now, candidates, index.quantizer)
        made, estimate = (scores.masked_fill(~known[:, :, None], 0.0) for scores in (self.made.scores, estimate))
        agree(made, estimate, "rerank: estimates", 2**-12)
        rows, counts = self.topk(now)
        merged = choosing.merge(made.masked_fill(~known[:, :, None], -torch.inf), self.scale, "max")
        best, wanted = definitions.topk(merged, candidates, K, SINK)
        demand(torch.equal(counts, wanted) and differing(rows, best) <= 1, "topk: rows differ")

    def moved(self) -> dict[str, int]:
        """Bytes that a step must read and write."""
        keys, picked = self.batch * HEADS * self.tokens, self.batch * HEADS * int(self.wanted[0])
        summary = 64 if self.now.weights is None else 96
        runs = self.batch * HEADS * GROUP * self.made.peaks.shape[3]
        return {
            "tiers": self.query.nbytes + self.now.sizes.nbytes + self.rotated.values.nbytes + self.table.nbytes,
            "collide": keys * 17,
            "planes": self.query.nbytes + self.rotated.values.nbytes + self.bits.nbytes,
            "signs": keys * 17,
            "bucket_topk": keys + 4 * picked,
            "rerank": picked * (4 + summary + 4 * GROUP),
            "topk": 4 * runs + self.batch * HEADS * K * self.run * (4 + 4 * GROUP),
            "select": keys * 18 + picked * (8 + summary + 4 * GROUP),
        }

    def in_torch(self) -> dict[str, Callable[[encoding.Summaries], object]]:
        """The steps in plain torch."""
        want = int(self.wanted[0])
        scores = self.got.scores[:, :, : self.tokens].contiguous()
        real, estimates = self.chosen[:, :, :want].contiguous(), self.made.scores[..., :want].contiguous()
        return {
            "tiers": lambda one: tiering.definition(tiering.similarities(self.rotated.values), one.sizes, self.limits),
            "collide": lambda one: collision.definition(self.table, one.ids, 0),
            "planes": lambda one: rounding.pack(rounding.coarse(self.rotated.values)),
            "signs": lambda one: signing.definition(self.bits, one.ids),
            "bucket_topk": lambda one: torch.topk(scores.int(), want, dim=2),
            "rerank": lambda one: reranking.definition(self.rotated, one, real, self.index.quantizer),
            "topk": lambda one: torch.topk(choosing.merge(estimates, self.scale, "max"), K, dim=2),
        }

    def times(self, *, with_torch: bool, steps: Sequence[str] = ()) -> list[dict[str, Any]]:
        """A line a step, of these or of all; with_torch: beside plain torch, where select's is the sum of its steps'."""
        if with_torch:
            self.check()
        plain = self.in_torch() if with_torch else {}
        lines, total = [], 0.0
        for step, moved in self.moved().items():
            if steps and step not in steps:
                continue
            line = {"op": step, "tokens": self.tokens, "batch": self.batch, **rates(self.seconds(step), moved)}
            if step in CODED:
                line["code_bits"] = self.bits_a_code
            if with_torch and not steps:
                theirs = replay_time(rotated(plain[step], self.sets[:2]), 5) if step in plain else total
                total += theirs if step not in ("tiers", "collide") else 0.0  # select takes votes by signs
                line |= {"torch_us": micros(theirs), "speedup": round(theirs * 1e6 / line["us"], 1)}
            if step == "select":
                line["method"] = "pariskv-plus"
                if self.batch == 1:
                    line["goal_us"] = GOALS[self.tokens]
            lines.append(line)
        return lines


def select_time(policy: Policy, tokens: int, *, paper: bool = False) -> dict[str, Any]:
    """The whole of select under a policy, of pariskv-plus or of pariskv."""
    index, query = make(1, tokens, policy, paper=paper), queries(1)
    index.select(query, K)
    seconds = replay_time([lambda: index.select(query, K)] * 8, 20)
    about = {"op": "select", "method": "pariskv" if paper else "pariskv-plus", "policy": policy, "cached": True}
    return about | {"tokens": tokens, "batch": 1, "us": micros(seconds)}


def fetch_in_torch(tokens: int) -> float:
    """Microseconds to gather K rows a head of pinned memory and copy them over, in torch."""
    store = torch.randn((HEADS, tokens, 2, DIM), dtype=torch.bfloat16).pin_memory()
    head, times = torch.arange(HEADS)[:, None], []
    for _ in range(30):
        rows = torch.randint(0, tokens, (HEADS, K))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        store[head, rows].to("cuda")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return micros(statistics.median(times))


if __name__ == "__main__":
    run_kernels(__doc__, lines, {**SHAPE, "method": "pariskv", "rows": K}, codes=False)
