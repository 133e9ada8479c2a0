"""Quest, ArkVale, PRKV and ClusterKV beside their papers' formulas in float64, with several query heads on a KV head."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.hybrid import HybridIndex
from kvthaw.index.units import UnitIndex

BUDGET, PROMPT = 120, 500


def most(scores: Tensor, sizes: list[int]) -> list[int]:
    """Units by the largest softmax weight that a query head of the group gives a token of theirs. scores [G, U]."""
    deferred = torch.logsumexp(scores + torch.tensor(sizes).double().log(), dim=1, keepdim=True)
    return (scores - deferred).amax(dim=0).argsort(descending=True).tolist()


def filled(ranked: list[int], members: list[list[int]], taken: list[int]) -> set[int]:
    return set((taken + [place for unit in ranked for place in members[unit]])[:BUDGET])


def bounds(queries: Tensor, keys: Tensor, page: int, spread: str) -> tuple[Tensor, list[list[int]]]:
    """[G, P] scores of pages of keys [T, D] and which places they hold: the larger of q times both ends, summed over channels."""
    scores = []
    for own in keys.split(page):
        low, high = own.amin(dim=0), own.amax(dim=0)
        if spread == "mean":
            centre = (low + high) / 2
            delta = (own - centre).abs().mean(dim=0)
            low, high = centre - delta, centre + delta
        scores.append(torch.maximum(queries * low, queries * high).sum(dim=1))
    places = torch.arange(len(keys)).split(page)
    return torch.stack(scores, dim=1), [part.tolist() for part in places]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("name", ["quest", "arkvale", "prkv", "clusterkv"])
def test_it_selects_what_the_paper_would(name: str, group: int) -> None:
    make = {
        "quest": partial(BoundIndex, page=16, spread="max"),
        "arkvale": partial(BoundIndex, page=32, spread="mean"),
        "prkv": HybridIndex,
        "clusterkv": partial(ClusterIndex, tokens_per_cluster=20),
    }[name]
    seqs = Seqs(make, [PROMPT], group=group)
    index, scale = seqs.index, seqs.context.scale
    assert isinstance(index, UnitIndex)
    found = seqs.sets(BUDGET)[0]
    for head in range(2):
        heads = slice(head * group, head * group + group)
        keys, queries = seqs.keys[0][head, FIRST : FIRST + PROMPT].double(), seqs.query()[0, heads].double()
        static: list[int] = []
        rest = torch.arange(PROMPT)
        if name == "clusterkv":
            stops = index.stops[0, head, : PROMPT // 20 + 1].tolist()
            where = index.order[0, head, :PROMPT].long() - FIRST
            members = [where[a:b].tolist() for a, b in itertools.pairwise(stops)]
            members = [m for m in members if m]
            scores = torch.stack([queries @ keys[m].mean(dim=0) for m in members], dim=1)
        else:
            if name == "prkv":
                watched = seqs.queries[0][heads, :64].double()
                mass = torch.softmax(scale * watched @ keys.T, dim=2).mean(dim=(0, 1))
                static = mass.topk(BUDGET // 4).indices.tolist()
                rest = torch.tensor([place for place in range(PROMPT) if place not in static])
            scores, pages = bounds(queries, keys[rest], 16 if name == "quest" else 32, "max" if name == "quest" else "mean")
            members = [rest[page].tolist() for page in pages]
        ranked = most(scale * scores, [len(m) for m in members])
        wanted = filled(ranked, members, static)
        assert {row - FIRST for row in found[head]} == wanted


def test_undo_brings_back_kept_keys_that_an_append_wrote_over() -> None:
    """Of more tokens than leave a ring at once; a batch that becomes full later is clustered as if they had never come."""
    plain, undone = (Seqs(partial(ClusterIndex, batch=32, clusters_per_batch=2), [100]) for _ in range(2))
    for seqs in (plain, undone):
        seqs.append(20)
    length = undone.length[0]
    undone.append(60)
    assert isinstance(undone.index, ClusterIndex)
    undone.index.undo(0, length)
    undone.store.truncate(0, length)
    undone.length[0] = length
    for seqs in (plain, undone):
        seqs.append(20)
    assert undone.sets(30) == plain.sets(30)
    assert isinstance(plain.index, ClusterIndex)
    units = int(plain.index.counts[0])
    assert int(undone.index.counts[0]) == units
    assert torch.equal(undone.index.digests[0, :, :units], plain.index.digests[0, :, :units])


def test_an_append_is_undone_exactly_after_a_reorder_too() -> None:
    """As beams reorder a batch between an update that runs ahead of a step and another step."""
    index, other = (Seqs(partial(ClusterIndex, batch=32, clusters_per_batch=2), [100, 70]).index for _ in range(2))
    assert isinstance(index, ClusterIndex)
    assert isinstance(other, ClusterIndex)
    first, second, third = torch.randn(2, 2, 100, 64, generator=torch.Generator().manual_seed(5)).split((20, 60, 20), dim=2)
    for one in (index, other):
        one.append([0, 1], first, first, None)
    index.append([0, 1], second, second, None)  # more than is kept, so that the keys before are written over
    for one in (index, other):
        one.reorder([1, 0])
    for seq, prompt in enumerate((70, 100)):
        index.undo(seq, FIRST + prompt + 20)
    for one in (index, other):
        one.append([0, 1], third, third, None)  # the batch is full
        one.join()
    assert index.seqs == other.seqs
    for seq, host in enumerate(index.seqs):
        assert torch.equal(index.digests[seq, :, : host.units], other.digests[seq, :, : host.units])


class Longest(UnitIndex):
    """Pages whose digest is the key of the largest norm."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context, size=8, batch=8, width=context.head_dim, policy="max")

    def digest(self, keys: Tensor) -> Tensor:
        pages = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[1] % self.size)).unflatten(1, (-1, self.size))
        longest = torch.linalg.vector_norm(pages, dim=3).argmax(dim=2)[:, :, None, None]
        return pages.take_along_dim(longest, dim=2)[:, :, 0]


@pytest.mark.parametrize("sizes", [(3, 20, 5, 60), (8, 8, 1, 1)])
def test_digests_of_another_kind_are_written_by_short_and_long_appends(sizes: tuple[int, ...]) -> None:
    """Of sequences whose last pages are full to different degrees, and after the last append is undone and made again."""
    seqs = Seqs(Longest, [70, 64, 5])
    index = seqs.index
    assert isinstance(index, Longest)
    for n in sizes:
        keys = torch.stack([own[:, at : at + n] for own, at in zip(seqs.keys, seqs.length, strict=True)])
        for _ in range(2):
            index.append(range(3), keys, keys, None)
            index.join()
            for seq, (own, length) in enumerate(zip(seqs.keys, seqs.length, strict=True)):
                wanted = [
                    part[:, part.norm(dim=2).argmax(dim=1)].diagonal().T for part in own[:, FIRST : length + n].split(8, dim=1)
                ]
                assert torch.equal(index.digests[seq, :, : len(wanted)], torch.stack(wanted, dim=1))
                index.undo(seq, length)
        index.append(range(3), keys, keys, None)
        seqs.length = [length + n for length in seqs.length]
