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
from benchmarks.kernels import DIM, HEADS, SHAPE, micros, replay_time
from benchmarks.kernels_pariskv import SINK, K, make, queries
from benchmarks.script import run_kernels
from kvthaw.index.codes import CodesIndex
from kvthaw.kernels import choose_rows, cuda
from kvthaw.kernels.split import shared_memory

THREE = CodesIndex._best
CASES = ((36864, 1, 8), (131072, 1, 8), (524288, 1, 4), (36864, 4, 4), (131072, 4, 2), (1 << 20, 1, 2))
"""Tokens, sequences, layers."""
CLUSTERS = 8, 16
PLACES = "begin wait collect barrier estimate sums barrier weights levels send barrier rank order"


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for i, (tokens, batch, count) in enumerate(CASES[:2] if quick else CASES):
        layers = [Layer(tokens, batch) for _ in range(count)]
        yield from times(layers)
        for blocks in CLUSTERS if batch == 1 else ():
            yield from attempts(parts, layers[0], blocks)
        del layers
        torch.cuda.empty_cache()
        if i < 2:
            for blocks in (0, *CLUSTERS) * 2:
                use(blocks)
                for line in attempts(kernels_chain.chain, "pariskv-plus", tokens):
                    yield {**line, "blocks": blocks}
            torch.cuda.empty_cache()


def use(blocks: int) -> None:
    """From now on indexes choose rows in clusters of so many blocks, or by three kernels (0)."""

    def best(self: CodesIndex, query: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        rotated, scores, width = self._score(query, budget)
        if not choose_rows.fits(scores, rotated, budget, width, self._merge, blocks):
            return THREE(self, query, budget)
        lengths, wanted = (self.tables[name][: query.shape[0]] for name in ("lengths", "wanted"))
        how: Any = (self.quantizer, width, budget, self._first, self.context.scale, blocks)
        return choose_rows.launch(scores, lengths, wanted, rotated, self.summaries, *how)

    setattr(CodesIndex, "_best", best if blocks else THREE)  # noqa: B010


def attempts(what: Callable[..., dict[str, Any]], *given: Any) -> Iterator[dict[str, Any]]:
    """What it returns, or a line that says why it does not."""
    try:
        yield what(*given)
    except Exception as error:
        yield {"op": what.__name__, "error": f"{type(error).__name__}: {str(error)[:300]}"}


class Layer:
    """An index of random keys, a query, and the coarse scores from which both ways begin."""

    def __init__(self, tokens: int, batch: int, device: str = "cuda") -> None:
        use(0)
        self.tokens, self.batch = tokens, batch
        self.index, self.query = make(batch, tokens, device=device), queries(batch, device)
        self.index.select(self.query, K)
        self.found = self.index._score(self.query, K)

    def choose(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Rows and counts from the scores that are there."""
        setattr(self.index, "_score", lambda *_: self.found)  # noqa: B010
        use(blocks)
        try:
            return self.index._best(self.query, K)
        finally:
            del self.index._score

    def select(self, blocks: int) -> object:
        use(blocks)
        return self.index.select(self.query, K)

    def check(self, blocks: int) -> dict[str, Any]:
        """What differs between a cluster and three kernels."""
        (rows, counts), (want, wanted) = self.choose(blocks), self.choose(0)
        pairs = zip(rows.flatten(0, 1), want.flatten(0, 1), strict=True)
        off = [int((~torch.isin(a, b)).sum()) for a, b in pairs]
        ordered = ((rows[:, :, 1:] > rows[:, :, :-1]) | (rows[:, :, 1:] < 0)).all()
        right = torch.equal(counts, wanted) and torch.equal(rows < 0, want < 0) and bool(ordered)
        return {"right": right and max(off) <= 1, "differing": sum(off), "most": max(off), "of": int(counts.sum())}


def times(layers: list[Layer]) -> Iterator[dict[str, Any]]:
    """Both ways, in turns."""
    one = layers[0]
    about = {"tokens": one.tokens, "batch": one.batch, "layers": len(layers)}
    repeats = max(1, 8 // len(layers))
    (rotated, scores, width), ways = one.found, [0]
    for blocks in CLUSTERS:
        if choose_rows.fits(scores, rotated, K, width, "max", blocks):
            for i, layer in enumerate(layers):
                checked = next(attempts(layer.check, blocks))
                yield {"op": "check", **about, "layer": i, "blocks": blocks, **checked}
            ways += [] if "error" in checked else [blocks]
    for turn in range(2):
        for blocks in ways:
            choice, select = [partial(x.choose, blocks) for x in layers], [partial(x.select, blocks) for x in layers]
            line: dict[str, Any] = {"op": "rows", **about, "blocks": blocks, "turn": turn}
            yield line | {"choice_us": us(choice * repeats), "select_us": us(select * repeats)}


def us(calls: Sequence[Callable[[], object]]) -> float:
    return micros(replay_time(calls, 30))


def parts(layer: Layer, blocks: int) -> dict[str, Any]:
    """Cycles that a cluster takes from place to place: the median over clusters, of the first block and of the slowest."""
    (rotated, scores, width), index = layer.found, layer.index
    how, device = choose_rows.constants(4, blocks) | {"TIMES": 1}, layer.query.device
    code = cuda.compiled(choose_rows.FILES, how, "sm_{}{}".format(*torch.cuda.get_device_capability()), str(torch.version.cuda))
    kernel = cuda.loaded(code, "choose_rows", shared_memory(device))
    now, share = index.summaries, -(-width // (16 * blocks)) * 16
    assert scores.counts is not None
    assert scores.totals is not None
    rows = torch.empty((1, HEADS, K), dtype=torch.int32, device=device)
    found = torch.zeros(HEADS * (1 + blocks * 16), dtype=torch.int32, device=device)
    for _ in range(3):
        kernel(
            (blocks, HEADS, 1), how["THREADS"], how["FIXED"] + share * 20, scores.scores, scores.counts, scores.totals,
            index.tables["lengths"], index.tables["wanted"], rotated.whole, rotated.factors, now.codes, now.weights, rows, found,
            c_int(HEADS), c_int(now.capacity), c_int(scores.counts.shape[3]), c_int(K), c_int(SINK), c_int(share),
            c_float(DIM**-0.5), *map(c_uint, index.quantizer.bytes),
        )  # fmt: skip
    seen, places = found[HEADS:].view(-1, blocks, 16), len(PLACES.split())
    first, slowest = seen[:, 0].median(dim=0).values.tolist(), seen.amax(dim=1).median(dim=0).values.tolist()
    line = {"op": "parts", "tokens": layer.tokens, "blocks": blocks, "places": PLACES}
    return line | {"first": first[:places], "slowest": slowest[:places]}


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE)
