"""The kernel that clusters what generated tokens fill a batch, under the interpreter without a GPU, against torch's operations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.deferred_batch import DeferredBatch
from kvthaw.index import batches as module
from kvthaw.index.clusters import ClusterIndex
from kvthaw.kernels import cluster_last
from kvthaw.kernels.kmeans import Distance

pytest.importorskip("triton")

CASES: list[tuple[int, int, str, Distance, int, int]] = [
    (40, 4, "covering", "cosine", 64, 8),
    (45, 5, "random", "l2", 40, 20),
    (60, 30, "covering", "inner", 16, 3),
    (36, 36, "covering", "cosine", 8, 1),  # each a cluster
    (32, 1, "random", "cosine", 64, 8),
]


def index_of(seqs: Seqs, *, one_launch: bool) -> ClusterIndex:
    assert isinstance(seqs.index, ClusterIndex)
    seqs.index._in_one_launch = one_launch
    return seqs.index


def tables(index: ClusterIndex) -> list[Tensor]:
    index.join()
    assert index.order is not None
    return [index.stops, index.order, index.digests, index.recent]


def same(one: ClusterIndex, other: ClusterIndex) -> None:
    for own, wanted in zip(tables(one), tables(other), strict=True):
        close = {"rtol": 1e-5, "atol": 1e-6} if own.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(own, wanted, **close)


@pytest.mark.parametrize(("batch", "count", "start", "distance", "dim", "iterations"), CASES)
def test_the_clusters_are_those_of_torchs_operations(
    batch: int, count: int, start: str, distance: Distance, dim: int, iterations: int, device: torch.device
) -> None:
    how: dict[str, Any] = {"batch": batch, "clusters_per_batch": count, "start": start, "distance": distance}
    make = partial(ClusterIndex, tokens_per_cluster=10, iterations=iterations, **how)
    both = [Seqs(make, [50, 33, 0], dim=dim, device=device) for _ in range(2)]
    for seqs in both:
        for each in seqs.keys:
            each[:, FIRST + 60 : FIRST + 70] = each[:, FIRST + 70 : FIRST + 71]  # ties
            each[:, FIRST + 75 : FIRST + 77] = 0  # no direction
        own = index_of(seqs, one_launch=seqs is both[0])
        for n in (1, *[7] * (3 * batch // 7)):  # over the end of what is kept
            seqs.append(n)
            own.join()
    same(*[index_of(seqs, one_launch=False) for seqs in both])


def tightness(seqs: Seqs, index: ClusterIndex, prompt: int, batch: int, before: int, count: int) -> float:
    """The mean cosine of a batch's keys with their clusters' means. All are there, in the text's order, and next to their means."""
    stops, order, digests, _ = tables(index)
    found: list[Tensor] = []
    for seq, all_keys in enumerate(seqs.keys):
        for head, keys in enumerate(all_keys.float()):
            ends = stops[seq, head, before : before + count + 1].tolist()
            units = [order[seq, head, begin:end] for begin, end in itertools.pairwise(ends)]
            text = torch.arange(FIRST + prompt, FIRST + prompt + batch, device=order.device, dtype=torch.int32)
            assert torch.equal(torch.cat(units).sort().values, text)
            means = digests[seq, head, before : before + count].float()
            unit_keys = torch.nn.functional.normalize(keys, dim=1)
            cosines = torch.nn.functional.normalize(means, dim=1) @ unit_keys.T
            for c, unit in enumerate(units):
                assert torch.equal(unit, unit.sort().values)
                if len(unit):
                    torch.testing.assert_close(means[c], keys[unit].mean(dim=0), rtol=1e-2, atol=1e-2)
                    assert (cosines[c, unit] >= cosines[:, unit].amax(dim=0) - 0.02).all()
                found.append(cosines[c, unit])
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_16_bits_are_next_to_their_means(dtype: torch.dtype, device: torch.device) -> None:
    """Ties that rounding decides may fall otherwise than in torch's operations, so by what k-means promises."""
    make = partial(ClusterIndex, tokens_per_cluster=10, batch=96, clusters_per_batch=6, iterations=20)
    seqs = Seqs(make, [50], dim=64, dtype=dtype, device=device)
    index = index_of(seqs, one_launch=True)
    for _ in range(6):
        seqs.append(16)
    assert tightness(seqs, index, 50, 96, 5, 6) > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "start", "iterations"), [(10, "covering", 20), (4, "random", 20), (16, "covering", 8)])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 64), (torch.bfloat16, 256)]
)
def test_as_many_tokens_as_a_layer_clusters(count: int, start: str, iterations: int, dtype: torch.dtype, dim: int) -> None:
    """As tight as by torch's operations, and the same again to the bit."""
    make = partial(ClusterIndex, batch=320, clusters_per_batch=count, start=start, iterations=iterations, tokens_per_cluster=32)  # type: ignore[call-arg]
    found, known = [], []
    for one_launch in (True, True, False):
        seqs = Seqs(make, [64, 64, 64], heads=8, dim=dim, dtype=dtype, device=torch.device("cuda"))
        index = index_of(seqs, one_launch=one_launch)
        for _ in range(20):
            seqs.append(16)
        found.append(tightness(seqs, index, 64, 320, 2, count))
        known.append([table.clone() for table in tables(index)])
    assert all(map(torch.equal, *known[:2]))
    assert found[0] == pytest.approx(found[2], rel=0.01)


def test_all_layers_and_sequences_are_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as of layers alone, to the bit, and taken back by undo()."""
    calls: list[tuple[int, int]] = []
    real = cluster_last.launch
    monkeypatch.setattr(cluster_last, "launch", lambda *args, **how: (calls.append(tuple(map(len, args))), real(*args, **how)))
    make = partial(ClusterIndex, tokens_per_cluster=10, batch=40, clusters_per_batch=4)
    seqs = Seqs(make, [50, 70], device=device)
    contexts = [replace(seqs.context, layer=layer, deferred=deferred) for deferred in (DeferredBatch(),) for layer in range(3)]
    layers = [make(context) for context in contexts]
    apart = [make(replace(context, deferred=None)) for context in contexts]
    calls.clear()
    for index in (*layers, *apart):
        index._in_one_launch = True
        for seq, keys in enumerate(seqs.keys):
            index.build(seq, FIRST, keys[:, FIRST : FIRST + 50], keys[:, FIRST : FIRST + 50], seqs.queries[0][:, :0])
    steps = [torch.stack([keys[:, at : at + 8] for keys in seqs.keys]) for at in range(FIRST + 50, FIRST + 98, 8)]
    for keys in steps:
        for index in layers:
            index.append([0, 1], keys, keys, None)
        contexts[0].deferred.flush()  # type: ignore[union-attr]
    assert calls == [(3, 2)]
    for one, other in zip(layers, apart, strict=True):
        for keys in steps:
            other.append([0, 1], keys, keys, None)
            other.join()
        for own, wanted in zip(tables(one), tables(other), strict=True):
            assert torch.equal(own, wanted)
    assert calls == [(3, 2), *[(1, 2)] * 3]
    assert not torch.equal(layers[0].digests[:, :, 5:9], layers[1].digests[:, :, 5:9]), "layers draw their own"


def test_a_batch_that_fills_is_taken_back_and_clustered_again(device: torch.device) -> None:
    both = [
        Seqs(partial(ClusterIndex, tokens_per_cluster=10, batch=40, clusters_per_batch=4), [50], device=device)
        for _ in range(2)
    ]
    for seqs in both:
        own = index_of(seqs, one_launch=True)
        for _ in range(4):
            seqs.append(8)
    before = [table.clone() for table in tables(own)]
    host = own.seqs[0].copy()
    seqs.append(8)
    own.join()
    assert not torch.equal(own.digests[:, :, 5:9], before[2][:, :, 5:9])
    own.undo(0, FIRST + 82)
    assert own.seqs[0] == host
    for table, wanted, until in zip(tables(own), before, (10, 82, 9), strict=False):
        assert torch.equal(table[:, :, :until], wanted[:, :, :until])
    seqs.length[0] -= 8
    for each in both:
        each.append(8)
    same(*[index_of(each, one_launch=True) for each in both])


def test_what_has_no_room_in_a_program_is_clustered_by_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_last.fits(320, 10, 256)
    assert cluster_last.fits(320, 4, 512)
    for sizes in ((1024, 10, 256), (320, 20, 256), (320, 10, 1024)):
        assert not cluster_last.fits(*sizes)
    calls: list[int] = []
    monkeypatch.setattr(module, "form", lambda every, count: calls.append(count))
    seqs = Seqs(partial(ClusterIndex, batch=40, clusters_per_batch=4), [0])
    index_of(seqs, one_launch=False)
    seqs.append(16)
    seqs.append(24)
    seqs.index.join()  # type: ignore[attr-defined]
    assert calls == [4]
