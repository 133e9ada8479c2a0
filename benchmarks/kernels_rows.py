"""pariskv-plus's choice of rows: bucket_topk, rerank and topk one after the other, or in one cluster of blocks a KV head.

us: of a layer, in a graph of several with tables of their own. `choice`: from coarse scores to rows; `select`: from the query;
`chain`: with admit, fetch and attention. `differing`: rows that only one way finds, of all that were compared. `parts`: cycles
until a block has passed the places that choose_rows.cu marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float, c_int, c_uint
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels_chain
from benchmarks.kernels import DIM, HEADS, SHAPE, demand, micros, replay_time
from benchmarks.kernels_pariskv import SINK, K, make, queries
from benchmarks.script import run_kernels
from kvthaw.index.codes import CodesIndex
from kvthaw.kernels import bucket_topk, choose_rows, collide, cuda, planes, rerank, signs, topk
from kvthaw.kernels.query import Rotated
from kvthaw.kernels.split import shared_memory

CASES = ((36864, 1, 8), (131072, 1, 8), (524288, 1, 4), (36864, 4, 4), (131072, 4, 2), (1 << 20, 1, 2))
"""Tokens, sequences, layers."""
CLUSTERS = 8, 16
PLACES = (
    "begin", "wait", "collect", "barrier", "estimate", "sums", "barrier", "weights", "send", "barrier", "count", "narrow", "rank",
    "order",
)  # fmt: skip


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for i, (tokens, batch, count) in enumerate(CASES[:2] if quick else CASES):
        layers = [Layer(tokens, batch) for _ in range(count)]
        yield from times(layers)
        if batch == 1:
            yield from attempts(parts, layers[0])
        del layers
        torch.cuda.empty_cache()
        if i < 2:
            yield from chains(tokens)
            torch.cuda.empty_cache()


def attempts(what: Callable[..., dict[str, Any]], *given: Any) -> Iterator[dict[str, Any]]:
    """What it returns, or a line that says why it does not."""
    try:
        yield what(*given)
    except Exception as error:
        yield {"op": what.__name__, "error": f"{type(error).__name__}: {str(error)[:300]}"}


class Layer:
    """An index of random keys, a query, and both ways to its rows."""

    def __init__(self, tokens: int, batch: int, device: str = "cuda") -> None:
        self.tokens, self.batch = tokens, batch
        self.index, self.query = make(batch, tokens, device=device), queries(batch, device)
        index, data = self.index, self.index.tables
        index.select(self.query, K)
        self.lengths, self.wanted = data["lengths"], data["wanted"]
        self.width = -(-index.ratios.most(index.summaries.capacity, K) // rerank.TILE) * rerank.TILE
        self.rotated, self.scores = scored(index, self.query)

    def apart(self) -> tuple[Tensor, Tensor]:
        index, run = self.index, topk.run_length(self.width, K) or rerank.TILE
        candidates = bucket_topk.launch(self.scores, self.lengths, self.wanted, self.width)
        scale, quantizer = index.context.scale, index.quantizer
        found = rerank.launch(self.rotated, index.summaries, candidates, self.wanted, quantizer, scale, run)
        return topk.launch(found, candidates, self.wanted, K, SINK, scale, "max")

    def together(self, blocks: int) -> tuple[Tensor, Tensor]:
        return chosen(self.index, self.rotated, self.scores, blocks)

    def check(self, blocks: int) -> tuple[int, int]:
        """Rows that are not among those of the three kernels, of how many. Raises CacheError where they are more than one of a
        head, not in order, or another number."""
        (rows, counts), (want, wanted) = self.together(blocks), self.apart()
        demand(torch.equal(counts, wanted), "choose_rows: counts differ")
        demand(torch.equal(rows < 0, want < 0), "choose_rows: other places are filled")
        demand(bool(((rows[:, :, 1:] > rows[:, :, :-1]) | (rows[:, :, 1:] < 0)).all()), "choose_rows: rows are not in order")
        off = [int((~torch.isin(a, b)).sum()) for a, b in zip(rows.flatten(0, 1), want.flatten(0, 1), strict=True)]
        demand(max(off) <= 1, f"choose_rows: {off} rows differ")
        return sum(off), int(counts.sum())


def scored(index: CodesIndex, query: Tensor) -> tuple[Rotated, collide.Scores]:
    """The rotated queries and the coarse scores of all keys."""
    totals = torch.empty((query.shape[0], HEADS, collide.BINS), dtype=torch.int32, device=query.device)
    rotated, bits = planes.launch(query, index.rotation, HEADS, totals, mean=False, combine="max")
    return rotated, signs.launch(bits, index.summaries.ids, index.tables["lengths"], totals)


def chosen(index: CodesIndex, rotated: Rotated, scores: collide.Scores, blocks: int) -> tuple[Tensor, Tensor]:
    """Rows and their counts, in one launch."""
    data, now = index.tables, index.summaries
    width = -(-index.ratios.most(now.capacity, K) // rerank.TILE) * rerank.TILE
    return choose_rows.launch(
        scores, data["lengths"], data["wanted"], rotated, now, index.quantizer, width, K, SINK, index.context.scale, blocks
    )


def select(index: CodesIndex, blocks: int, query: Tensor) -> Tensor:
    return chosen(index, *scored(index, query), blocks)[0]


def times(layers: list[Layer]) -> Iterator[dict[str, Any]]:
    """Both ways, in turns."""
    one = layers[0]
    about = {"tokens": one.tokens, "batch": one.batch, "layers": len(layers)}
    repeats = max(1, 8 // len(layers))
    ways = [blocks for blocks in CLUSTERS if choose_rows.fits(one.query.device, choose_rows.SUBS, 4, K, one.width, blocks)]
    for blocks in list(ways):
        try:
            off, of = map(sum, zip(*(layer.check(blocks) for layer in layers), strict=True))
            yield {"op": "check", **about, "blocks": blocks, "differing": off, "of": of}
        except Exception as error:
            ways.remove(blocks)
            yield {"op": "check", **about, "blocks": blocks, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    for turn in range(2):
        for blocks in (0, *ways):
            alone = [partial(layer.together, blocks) if blocks else layer.apart for layer in layers]
            whole = [
                partial(select, layer.index, blocks, layer.query) if blocks else partial(layer.index.select, layer.query, K)
                for layer in layers
            ]
            line: dict[str, Any] = {"op": "rows", **about, "blocks": blocks, "turn": turn}
            yield line | {"choice_us": us(alone * repeats), "select_us": us(whole * repeats)}


def us(calls: Sequence[Callable[[], object]]) -> float:
    return micros(replay_time(calls, 30))


def parts(layer: Layer, blocks: int = 8) -> dict[str, Any]:
    """Cycles that a cluster takes from place to place: the median over clusters, of the first block and of the slowest."""
    index, scores, rotated, batch = layer.index, layer.scores, layer.rotated, layer.batch
    how, device = choose_rows.constants(4, blocks) | {"TIMES": 1}, layer.query.device
    code = cuda.compiled(choose_rows.FILES, how, "sm_{}{}".format(*torch.cuda.get_device_capability()), str(torch.version.cuda))
    kernel = cuda.loaded(code, "choose_rows", shared_memory(device))
    now, share = index.summaries, -(-layer.width // (16 * blocks)) * 16
    assert scores.counts is not None
    assert scores.totals is not None
    rows = torch.empty((batch, HEADS, K), dtype=torch.int32, device=device)
    found = torch.zeros(batch * HEADS * (1 + blocks * 16), dtype=torch.int32, device=device)
    for _ in range(3):
        kernel(
            (blocks, HEADS, batch), how["THREADS"], how["FIXED"] + share * 20, scores.scores, scores.counts, scores.totals,
            layer.lengths, layer.wanted, rotated.whole, rotated.factors, now.codes, now.weights, rows, found, c_int(HEADS),
            c_int(now.capacity), c_int(scores.counts.shape[3]), c_int(K), c_int(SINK), c_int(share), c_float(DIM**-0.5),
            *map(c_uint, index.quantizer.bytes),
        )  # fmt: skip
    seen = found[batch * HEADS :].view(-1, blocks, 16)
    first, slowest = seen[:, 0].median(dim=0).values.tolist(), seen.amax(dim=1).median(dim=0).values.tolist()
    line = {"op": "parts", "tokens": layer.tokens, "blocks": blocks, "places": ", ".join(PLACES)}
    return line | {"first": first[: len(PLACES)], "slowest": slowest[: len(PLACES)]}


def chains(tokens: int) -> Iterator[dict[str, Any]]:
    """All launches of a layer, by either way."""
    usual = kernels_chain.selection

    def other(_: str, tokens: int, device: str) -> Callable[[Tensor], Tensor]:
        return partial(select, make(1, tokens, device=device), 8)

    for blocks, selection in ((0, usual), (8, other), (0, usual), (8, other)):
        setattr(kernels_chain, "selection", selection)  # noqa: B010
        for line in attempts(kernels_chain.chain, "pariskv-plus", tokens):
            yield {**line, "blocks": blocks}
    setattr(kernels_chain, "selection", usual)  # noqa: B010


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE)
