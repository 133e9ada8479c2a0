"""RetroInfer's index against its formulas, in float64, one head at a time."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import dense
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep
from kvthaw.kernels.flash_decode import definition as attend
from kvthaw.kernels.merge import merge
from kvthaw_baselines.index.wave import WaveIndex
from shapes import close

SMALL = partial(WaveIndex, segment=96, tokens_per_cluster=8, batch=32)


class Wave(Seqs):
    """Sequences whose values are not their keys."""

    def values(self, seq: int) -> Tensor:
        return self.keys[seq].flip(2) * 0.5 + 1

    def __init__(self, prompts: list[int], group: int = 2, dim: int = 64, **options: object) -> None:
        super().__init__(partial(SMALL, **options), prompts, group=group, dim=dim, more=200, build=False)
        for seq, prompt in enumerate(prompts):
            part = slice(FIRST, FIRST + prompt)
            self.index.build(seq, FIRST, self.keys[seq][:, part], self.values(seq)[:, part], self.queries[seq][:, :64])

    def append(self, n: int, seqs: object = None) -> None:
        parts = [slice(length, length + n) for length in self.length]
        keys = torch.stack([k[:, part] for k, part in zip(self.keys, parts, strict=True)])
        values = torch.stack([self.values(seq)[:, part] for seq, part in enumerate(parts)])
        self.length = [length + n for length in self.length]
        self.index.append(list(range(len(parts))), keys, values, None)

    def clusters(self, seq: int, head: int) -> list[list[int]]:
        """Positions of each unit of a head."""
        index = self.index
        assert isinstance(index, WaveIndex)
        assert index.order is not None
        stops = index.stops[seq, head, : index.seqs[seq].units + 1].tolist()
        return [index.order[seq, head, a:b].tolist() for a, b in itertools.pairwise(stops)]


def expected(
    wave: Wave, seq: int, head: int, query: Tensor, budget: int, closed: int, share: float
) -> tuple[set[int], Tensor, Tensor]:
    """Rows of a KV head, and the estimate for query [G, D]: out [G, D] and lse [G]. All in float64."""
    units = wave.clusters(seq, head)
    keys, values = wave.keys[seq][head].double(), wave.values(seq)[head].double()
    scale = wave.context.scale
    centroids = torch.stack([keys[u].mean(dim=0) if u else torch.zeros(keys.shape[1]).double() for u in units])
    sizes = torch.tensor([len(u) for u in units]).double()
    scores = query @ centroids.T * scale
    weights = scores.exp() / (sizes * scores.exp()).sum(dim=1, keepdim=True)
    order = [u for u in weights.mean(dim=0).argsort(descending=True).tolist() if units[u]]
    rows: list[int] = []
    untouched = []
    for u in order:
        take = units[u][: budget - len(rows)]
        rows += take
        if not take:
            untouched.append(u)
    zone = [u for u in untouched if u < closed][: int(share * closed)]
    out, lse = torch.zeros_like(query), torch.full((len(query),), -math.inf).double()
    for g, q in enumerate(query):
        if zone:
            mass = torch.stack([sizes[u] * torch.exp(scale * (q @ centroids[u])) for u in zone])
            sums = torch.stack([values[units[u]].mean(dim=0) for u in zone])
            out[g], lse[g] = (mass[:, None] * sums).sum(dim=0) / mass.sum(), mass.sum().log()
    return set(rows), out, lse


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("share", [0.0, 0.23, 1.0])
def test_rows_and_estimate_are_the_definitions(share: float, dim: int) -> None:
    wave = Wave([250, 61], group=3, dim=dim, estimated=share)
    for step, more in enumerate([0, 20, 20, 64, 1]):
        if more:
            wave.append(more)
        query = wave.query(step)
        selection = wave.index.select(query, 40)
        assert selection.partial is not None
        for seq in range(2):
            closed = int(wave.index.closed[seq])
            came = sum([0, 20, 20, 64, 1][: step + 1])
            first = [31, 7][seq]  # two segments of 96 and one of 58 in clusters of 8; one of 61
            assert closed == first + came // 32 * 4
            for head in range(2):
                mine = slice(3 * head, 3 * head + 3)
                rows, out, lse = expected(wave, seq, head, query[seq, mine].double(), 40, closed, share)
                assert set(selection.rows[seq, head].tolist()) - {-1} == rows
                close(selection.partial.out[seq, mine], out, torch.float32)
                close(selection.partial.lse[seq, mine], lse, torch.float32)


def test_segments_are_clustered_among_themselves() -> None:
    wave = Wave([250])
    for head in range(2):
        units = wave.clusters(0, head)
        assert sorted(t for u in units for t in u) == list(range(FIRST, FIRST + 250))
        for u in units:
            assert len({(t - FIRST) // 96 for t in u}) <= 1
            keys = wave.keys[0][head].double()
            for t in u:  # nearest by cosine, within its segment
                mine = [v for v in units if v and (v[0] - FIRST) // 96 == (t - FIRST) // 96]
                near = [float(torch.cosine_similarity(keys[t], keys[v].mean(dim=0), dim=0)) for v in mine]
                assert near[mine.index(u)] >= max(near) - 1e-6


def test_the_estimate_brings_attention_nearer_to_full() -> None:
    """Keys in clumps: reading a few clusters and estimating the rest beats reading alone."""
    g = torch.Generator().manual_seed(0)
    middles = torch.randn(1, 12, 64, generator=g)
    which = torch.randint(0, 12, (400,), generator=g)
    keys = middles[:, which] + 0.2 * torch.randn(1, 400, 64, generator=g)
    values = torch.randn(1, 12, 64, generator=g)[:, which] + 0.2 * torch.randn(1, 400, 64, generator=g)
    query = torch.randn(1, 2, 64, generator=g)
    wave = Seqs(partial(WaveIndex, segment=512, tokens_per_cluster=16, estimated=1.0), [400], heads=1, build=False)
    wave.index.build(0, FIRST, keys, values, query[0, :, None])
    chosen = wave.index.select(query, 50)
    assert chosen.partial is not None
    scale = wave.context.scale
    visible = torch.zeros(1, 1, 400, dtype=torch.bool)
    visible[0, 0, chosen.rows[0, 0].long() - FIRST] = True
    read = attend(DecodeStep(query, keys[None], values[None], scale=scale), AnyOrder(visible))
    full = dense.definition(query[:, :, None], keys[None], values[None], scale=scale, causal=False)[0][:, :, 0]
    both = merge([read.out, chosen.partial.out], [read.lse, chosen.partial.lse])[0]
    assert (both - full).norm() < 0.3 * (read.out - full).norm()


@pytest.mark.parametrize("cut", [FIRST + 20, FIRST + 100, FIRST + 255, FIRST + 270, FIRST + 290])
def test_truncated_then_grown_estimates_what_it_has(cut: int) -> None:
    wave = Wave([250], estimated=1.0)
    wave.append(20)
    wave.append(30)
    wave.index.truncate(0, cut)
    wave.length = [cut]
    wave.append(40)
    units = wave.clusters(0, 0)
    assert sorted(t for u in units for t in u) == list(range(FIRST, cut + 40))
    index = wave.index
    assert isinstance(index, WaveIndex)
    new = [i for i, u in enumerate(units) if u and min(u) >= max(cut, FIRST + 256) and i < int(index.closed[0])]
    for i in new:
        close(index.values[0, 0, i], wave.values(0)[0, units[i]].mean(dim=0))
    partial_ = index.select(wave.query(), 16).partial
    assert partial_ is not None
    assert torch.isfinite(partial_.out).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"segment": 100}, "segment is 100"),
        ({"batch": 0}, "batch is 0"),
        ({"tokens_per_cluster": 0}, "tokens_per_cluster is 0"),
        ({"estimated": 1.5}, r"estimated is 1\.5"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Seqs(partial(SMALL, **options), [20])
