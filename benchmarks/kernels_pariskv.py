"""ParisKV's kernels: each checked against its definition with new random inputs, then timed as replays of a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.checks_pariskv import BUFFER, CHECKED, DIM, GROUP, HEADS, SINK, WINDOW, K, check, make, queries
from benchmarks.kernels_decode import decode, gather, rates, replay_time
from benchmarks.script import Report, run_kernels
from kvthaw.errors import CacheError
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

DEVICE_GBPS = 4200
"""What one H200 was measured to move, read and written."""
GOALS = {1 << 17: 30, 1 << 19: 65, 1 << 20: 120}
"""Microseconds that select should take at batch 1, by tokens."""
_COLD = 256 << 20  # bytes to pass over before ids may be read again: four times the L2 cache
_TUNING = 100  # seconds


def main(
    *, quick: bool = False, tuning: bool = False, out: Path | None = None, commit: str | None = None
) -> list[dict[str, Any]]:
    """Check, measure and print a JSON line a case. quick: fewer and shorter ones; tuning: other shapes of the kernels instead.
    Raises CacheError where a kernel is wrong."""
    if not torch.cuda.is_available():
        raise CacheError("timing kernels needs a CUDA device; their definitions and checks run in the tests without one")
    torch.manual_seed(time.time_ns() % (1 << 31))
    report = Report(out, commit, bench="kernels", method="pariskv", kv_heads=HEADS, group=GROUP, head_dim=DIM, rows=K)

    def checked(policy: Policy, group: int, dim: int) -> None:
        report({"op": "check", "policy": policy, "group": group, "head_dim": dim, **check(policy, group=group, dim=dim)})

    def timed(batch: int) -> None:
        for tokens in (1 << 17,) if quick else GOALS:
            for line in Chain(batch, tokens).times(with_torch=batch * tokens <= 1 << 21):
                report(line)
            torch.cuda.empty_cache()
        line = {**gather(K, 1 << 14 if quick else 1 << 17, batch=batch), "op": "fetch"}
        report(line | ({"torch_us": fetch_in_torch(1 << 14)} if batch == 1 else {}))
        report({**decode(batch, SINK + WINDOW + BUFFER + K, masked=True), "op": "attention"})

    with torch.inference_mode():
        checked(*CHECKED[0])  # what is timed first: a run that is cut has the most telling lines
        if tuning:
            for line in tune():
                report(line)
            return report.lines
        report({"op": "launch", "us": launch_time()})
        report(encode_time(1 << 17))
        timed(1)
        for other in CHECKED[1:]:
            checked(*other)
        for paper in (True, False):
            report(select_time("max", 1 << 17, paper=paper))
        report(select_time("mean_query", 1 << 17))
        report(select_time("mean", 1 << 17))
        if not quick:
            timed(4)
            timed(16)
    return report.lines


def launch_time() -> float:
    """Microseconds of a launch that does next to nothing and waits for the one before it."""
    one = torch.zeros(1, device="cuda")
    return round(replay_time([lambda: one.add_(1)] * 32) * 1e6, 2)


def encode_time(tokens: int) -> dict[str, Any]:
    """Encoding all keys of a prompt, less their mean; beside it with the count of its clusters, which tiers need."""
    index = make(1, tokens)
    keys = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)

    def counted() -> None:
        _encode(index, keys)
        encoding.launch_count(index.summaries, [0], [0], [tokens])

    alone, both = _event_time(lambda: _encode(index, keys)), _event_time(counted)
    theirs = _event_time(lambda: encoding.definition(keys[0], index.rotation, index.quantizer))
    moved = keys.nbytes + HEADS * tokens * 112
    line = {"op": "encode", "tokens": tokens, "batch": 1, **rates(alone, moved, DEVICE_GBPS), "goal_us": 300}
    return line | {
        "counted_us": round(both * 1e6, 2),
        "torch_us": round(theirs * 1e6, 2),
        "speedup": round(theirs / alone, 1),
    }


def _encode(index: CodesIndex, keys: Tensor) -> None:
    encoding.launch(keys, index.rotation, index.quantizer, index.summaries, [0], [0], index.tables.get("centre"))


def _event_time(call: Callable[[], object]) -> float:
    """Seconds of a call that copies from the host, so not as a graph; the host runs ahead while the device sleeps."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    for _ in range(12):
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


class Chain:
    """The steps of select, each on what the one before it left, and the whole, on enough copies of the index that none is still
    cached when its turn comes."""

    def __init__(self, batch: int, tokens: int) -> None:
        self.batch, self.tokens, self.scale = batch, tokens, DIM**-0.5
        self.index, self.query = make(batch, tokens), queries(batch)
        index, data, self.now = self.index, self.index.tables, self.index.summaries
        index.select(self.query, K)
        self.lengths, self.wanted, self.limits = data["lengths"], data["wanted"], data["limits"]
        count = max(1, -(-_COLD // self.now.ids.nbytes))
        copies = (
            (x.clone() for x in (self.now.ids, self.now.codes, self.now.weights, self.now.sizes)) for _ in range(1, count)
        )
        self.sets = [self.now, *(encoding.Summaries(*copy) for copy in copies)]
        self.width = -(-index.ratios.most(self.now.capacity, K) // reranking.TILE) * reranking.TILE
        run = choosing.run_length(self.width, K)
        assert run is not None
        self.run = run
        self.totals = torch.zeros((batch, HEADS, collision.BINS), dtype=torch.int32, device="cuda")
        _, self.table = self.tiers(self.now)
        self.rotated, self.bits = self.planes(self.now)
        self.got = signing.launch(self.bits, self.now.ids, self.lengths, self.totals.clone())
        self.chosen = self.bucket_topk(self.now)
        self.made = self.rerank(self.now)

    def tiers(self, one: encoding.Summaries) -> tuple[turning.Rotated, Tensor]:
        return tiering.launch(self.query, self.index.rotation, one.sizes, self.limits, self.totals, mean=False, combine="max")

    def planes(self, one: encoding.Summaries) -> tuple[turning.Rotated, Tensor]:
        return rounding.launch(self.query, self.index.rotation, HEADS, self.totals, mean=False, combine="max")

    def collide(self, one: encoding.Summaries) -> object:
        return collision.launch(self.table, one.ids, self.lengths, self.totals, "max", 0)

    def signs(self, one: encoding.Summaries) -> object:
        return signing.launch(self.bits, one.ids, self.lengths, self.totals)

    def bucket_topk(self, one: encoding.Summaries) -> Tensor:
        return bucket.launch(self.got, self.lengths, self.wanted, self.width)

    def rerank(self, one: encoding.Summaries) -> reranking.Estimates:
        return reranking.launch(self.rotated, one, self.chosen, self.wanted, self.index.quantizer, self.scale, self.run)

    def topk(self, one: encoding.Summaries) -> tuple[Tensor, Tensor]:
        return choosing.launch(self.made, self.chosen, self.wanted, K, SINK, self.scale, "max")

    def select(self, one: encoding.Summaries) -> object:
        self.index.summaries = one
        return self.index.select(self.query, K)

    def seconds(self, step: str, replays: int = 20) -> float:
        """Of a step of this name."""
        seconds = replay_time(_calls(getattr(self, step), self.sets), replays)
        self.index.summaries = self.now
        return seconds

    def moved(self) -> dict[str, int]:
        """Bytes that a step must read and write."""
        keys, picked = self.batch * HEADS * self.tokens, self.batch * HEADS * int(self.wanted[0])
        runs = self.batch * HEADS * GROUP * (self.made.peaks.shape[3] if self.made.peaks is not None else 0)
        return {
            "tiers": self.query.nbytes + self.now.sizes.nbytes + self.rotated.values.nbytes + self.table.nbytes,
            "collide": keys * 17,
            "planes": self.query.nbytes + self.rotated.values.nbytes + self.bits.nbytes,
            "signs": keys * 17,
            "bucket_topk": keys + 4 * picked,
            "rerank": picked * (100 + 4 * GROUP),
            "topk": 4 * runs + self.batch * HEADS * K * self.run * (4 + 4 * GROUP),
            "select": keys * 18 + picked * (104 + 4 * GROUP),
        }

    def in_torch(self) -> dict[str, Callable[[encoding.Summaries], object]]:
        """The steps in plain torch."""
        want = int(self.wanted[0])
        scores = self.got.scores[:, :, : self.tokens].contiguous()
        real, estimates = self.chosen[:, :, :want].contiguous(), self.made.scores[..., :want].contiguous()
        return {
            "tiers": lambda one: tiering.definition(tiering.similarities(self.rotated.values), one.sizes, self.limits),
            "collide": lambda one: collision.definition(self.table, one.ids, "max", 0),
            "planes": lambda one: rounding.pack(rounding.coarse(self.rotated.values, "max")),
            "signs": lambda one: signing.definition(self.bits, one.ids),
            "bucket_topk": lambda one: torch.topk(scores.int(), want, dim=2),
            "rerank": lambda one: reranking.definition(self.rotated, one.codes, one.weights, real, self.index.quantizer),
            "topk": lambda one: torch.topk(choosing.merge(estimates, self.scale, "max"), K, dim=2),
        }

    def times(self, *, with_torch: bool) -> list[dict[str, Any]]:
        """A line a step; with_torch: beside plain torch, where select's is the sum of its steps'."""
        plain = self.in_torch() if with_torch else {}
        lines, total = [], 0.0
        for step, moved in self.moved().items():
            line = {"op": step, "tokens": self.tokens, "batch": self.batch, **rates(self.seconds(step), moved, DEVICE_GBPS)}
            if with_torch:
                theirs = replay_time(_calls(plain[step], self.sets[:2]), 5) if step in plain else total
                total += theirs if step not in ("tiers", "collide") else 0.0  # select takes votes by signs
                line |= {"torch_us": round(theirs * 1e6, 2), "speedup": round(theirs * 1e6 / line["us"], 1)}
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
    return about | {"tokens": tokens, "batch": 1, "us": round(seconds * 1e6, 2)}


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
    return round(sorted(times)[len(times) // 2] * 1e6, 2)


def _always(tile: int, splits: int) -> Callable[[int], tuple[int, int]]:
    """A shape of rerank whatever the run."""

    def shape(run: int) -> tuple[int, int]:
        return max(tile, run), splits

    shape.__name__ = f"{tile} x {splits}"
    return shape


SHAPES: tuple[tuple[str, Any, dict[str, tuple[Any, ...]]], ...] = (
    ("rerank", reranking, {"shape": (reranking.shape, *(_always(*s) for s in ((32, 128), (32, 144), (32, 96), (32, 256))))}),
    ("collide", collision, {"CHUNK": (2048, 2048, 1024, 1024, 4096), "WARPS": (4, 8, 2, 4, 8)}),
    ("signs", signing, {"TILE": (512, 1024, 256, 512, 256, 512), "CHUNK": (2048, 2048, 2048, 1024, 1024, 4096)}),
    ("topk", choosing, {"PER_WARP": (512, 256, 128, 1024)}),
    ("tiers", tiering, {"WARPS": (4, 2, 8)}),
    ("bucket_topk", bucket, {"WARPS": (4, 8, 2)}),
    ("encode", encoding, {
        "BLOCK": (64, 64, 64, 64, 64, 32, 128),
        "STAGES": (3, 2, 2, 3, 4, 3, 2),
        "WARPS": (4, 4, 4, 4, 4, 4, 8),
        "LOOPS": (32, 32, 64, 64, 32, 64, 16),
        "PROGRAMS": (512, 512, 384, 256, 512, 512, 512),
    }),
)  # fmt: skip
"""Step, its module, constants there and what to try together: the first of each is what the module has."""


def tune() -> list[dict[str, Any]]:
    """Times of the steps in other shapes, at the shortest and the longest context, best first a step; some are left out when the
    time for it is over. A shape that the device cannot launch says so."""
    begin = time.monotonic()
    chains = [Chain(1, min(GOALS)), Chain(1, max(GOALS))]
    keys = torch.randn(1, HEADS, min(GOALS), DIM, device="cuda", dtype=torch.bfloat16)
    lines = []
    for step, module, constants in SHAPES:
        found = []
        for values in zip(*constants.values(), strict=True):
            shape = dict(zip(constants, values, strict=True))
            told = {name: getattr(value, "__name__", value) for name, value in shape.items()}
            line: dict[str, Any] = {"op": "shape", "step": step, **told}
            if time.monotonic() - begin > _TUNING:
                line["error"] = "not tried: out of time"
            else:
                with mock.patch.multiple(module, **shape):
                    try:
                        if step == "encode":
                            line["us"] = [round(_event_time(lambda: _encode(chains[0].index, keys)) * 1e6, 2)]
                        else:
                            line["us"] = [round(chain.seconds(step) * 1e6, 2) for chain in chains]
                    except Exception as reason:  # more shared memory or registers than there are
                        line["error"] = str(reason)[:80]
            found.append(line)
        lines += sorted(found, key=lambda line: sum(line.get("us", [float("inf")])))
    return lines


def _calls(call: Callable[[encoding.Summaries], object], sets: Sequence[encoding.Summaries]) -> list[Callable[[], object]]:
    def on(one: encoding.Summaries) -> Callable[[], object]:
        return lambda: call(one)

    return [on(sets[i % len(sets)]) for i in range(max(4, len(sets)))]


if __name__ == "__main__":
    text = "other shapes of the kernels instead, best first; at most 2 minutes"
    run_kernels(main, __doc__, {"tuning": (False, text)})
