"""Semantic clusters as an index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs, sample_positions
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.streams import DeferredBatch
from kvthaw.errors import ConfigError
from kvthaw.index import batches as module
from kvthaw.index.batches import BatchedIndex
from kvthaw.index.clusters import ClusterIndex, covering
from kvthaw.kernels.kmeans import kmeans_in_pieces, whole
from kvthaw.kernels.rerank import TILE
from kvthaw_baselines.index.nodes import NodeConfig, NodeIndex

SMALL = partial(ClusterIndex, tokens_per_cluster=10, batch=40, clusters_per_batch=4)


def test_rows_are_the_definitions() -> None:
    """k-means by cosine and ranking by q.mu (sections III-B and III-C), in float64, one head at a time, from the keys drawn."""
    seqs = Seqs(partial(SMALL, start="random", iterations=20), [200], heads=2, group=1)
    found = seqs.sets(70)[0]
    drawn = sample_positions(FIRST + torch.arange(200), 20, seed=7, layer=3, heads=2)
    for head in range(2):
        keys, query = seqs.keys[0][head, FIRST : FIRST + 200].double(), seqs.query()[0, head].double()
        centroids, labels = [keys[token] for token in drawn[head].tolist()], None
        for _ in range(20):
            near = [[float(key @ mu / (key.norm() * mu.norm())) for mu in centroids] for key in keys]
            again = [row.index(max(row)) for row in near]
            if again == labels:
                break
            labels = again
            members = [[token for token, label in enumerate(labels) if label == c] for c in range(20)]
            centroids = [keys[own].mean(dim=0) if own else mu for own, mu in zip(members, centroids, strict=True)]
        ranked = sorted(range(20), key=lambda c: -float(query @ centroids[c]))
        wanted = [FIRST + token for c in ranked for token in members[c]]
        assert found[head] == set(wanted[:70])


def test_clusters_are_taken_by_their_score_and_the_last_is_cut() -> None:
    seqs = Seqs(SMALL, [300], heads=2, group=1)
    index, found = seqs.index, seqs.sets(70)[0]
    assert isinstance(index, ClusterIndex)
    assert index.order is not None
    for head in range(2):
        stops, order = index.stops[0, head, :31].tolist(), index.order[0, head].tolist()
        assert stops[0] == 0
        assert stops[30] == 300
        scores = index.digests[0, head, :30] @ seqs.query()[0, head]
        wanted: list[int] = []
        for unit in scores.argsort(descending=True).tolist():
            wanted += order[stops[unit] : stops[unit + 1]]
        assert found[head] == set(wanted[:70])


def test_the_prompts_clusters_are_kmeans_of_its_keys() -> None:
    seqs = Seqs(SMALL, [120], heads=2)
    index = seqs.index
    assert isinstance(index, ClusterIndex)
    assert index.order is not None
    index.join()
    keys = seqs.keys[0][:, FIRST : FIRST + 120]
    drawn = sample_positions(FIRST + torch.arange(120), 6, seed=7, layer=3, heads=2)
    start = whole(covering(keys, drawn, 12))
    means, order, stops = whole(kmeans_in_pieces(keys, start, distance="cosine", iterations=8))
    torch.testing.assert_close(index.digests[0, :, :12], means)
    assert torch.equal(index.order[0, :, :120], order + FIRST)
    assert torch.equal(index.stops[0, :, :13], stops)


def test_a_full_batch_is_clustered_among_itself_however_it_came() -> None:
    one, many = Seqs(SMALL, [100, 30]), Seqs(SMALL, [100, 30])
    one.append(90)
    for n in (16, 16, 16, 1, 30, 11):
        many.append(n)
    a, b = one.index, many.index
    assert isinstance(a, ClusterIndex)
    assert isinstance(b, ClusterIndex)
    assert [seq.units for seq in a.seqs] == [10 + 4 + 4 + 1, 3 + 4 + 4 + 1]
    a.join()
    b.join()
    for seq, host in enumerate(a.seqs):
        assert host == b.seqs[seq]
        for x, y in ((a.digests, b.digests), (a.order, b.order)):
            assert x is not None
            assert y is not None
            used = host.units if x is a.digests else host.tokens
            torch.testing.assert_close(x[seq, :, :used], y[seq, :, :used])
        assert torch.equal(a.stops[seq, :, : host.units + 1], b.stops[seq, :, : host.units + 1])
        assert a.order is not None
        batch = a.order[seq, :, 100:140] if seq == 0 else a.order[seq, :, 30:70]
        assert not torch.equal(batch, batch.sort(dim=1).values)  # clustered, no longer in text order


@pytest.mark.parametrize("at_once", [module.AT_ONCE, 1])
def test_layers_batches_are_clustered_at_once_time_after_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are replayed nobody asks the indexes between one batch and the next. And layer by layer, in little memory."""
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    calls: list[int] = []
    real = module.form
    monkeypatch.setattr(module, "form", lambda every, count: (calls.append(len(every)), real(every, count))[1])
    seqs = Seqs(SMALL, [50])
    deferred = DeferredBatch()
    shapes = [replace(seqs.context, layer=layer, deferred=deferred) for layer in range(3)]
    layers = [SMALL(shape) for shape in shapes]
    apart = [SMALL(replace(shape, deferred=None)) for shape in shapes]
    keys = seqs.keys[0]
    for index in (*layers, *apart):
        index.build(0, FIRST, keys[:, FIRST : FIRST + 50], keys[:, FIRST : FIRST + 50], seqs.queries[0][:, :0])
    deferred.flush()
    assert calls == [3]  # short prompts, too
    calls.clear()
    for begin in range(FIRST + 50, FIRST + 210, 40):
        some = keys[None, :, begin : begin + 40]
        for index in layers:
            index.append([0], some, some, None)
        deferred.flush()
    assert calls == [3] * 4
    for one, other in zip(layers, apart, strict=True):
        for begin in range(FIRST + 50, FIRST + 210, 40):
            some = keys[None, :, begin : begin + 40]
            other.append([0], some, some, None)
        for rows in (60, 120):
            query = seqs.query()
            assert torch.equal(one.select(query, rows).rows, other.select(query, rows).rows)


def test_tokens_can_be_selected_before_their_batch_is_full() -> None:
    seqs = Seqs(SMALL, [100])
    seqs.append(5)
    seqs.keys[0][:, 109] = 50 * seqs.query()[0].view(2, 2, -1).mean(dim=1)
    seqs.append(1)
    seqs.append(2)
    assert all(109 in found for found in seqs.sets(12)[0])


def test_truncating_within_the_last_batch_is_as_if_it_had_not_come() -> None:
    cut, plain = Seqs(SMALL, [100]), Seqs(SMALL, [100])
    cut.append(75)
    cut.truncate(0, FIRST + 155)
    plain.append(55)
    assert cut.sets(40) == plain.sets(40)
    cut.append(30)
    plain.append(30)
    assert cut.sets(40) == plain.sets(40)
    cut.append(5)  # 190
    cut.truncate(0, FIRST + 180)  # exactly full, so clustered
    plain.truncate(0, FIRST + 180)
    assert cut.sets(40) == plain.sets(40)
    # and the cut makes it an open batch again
    cut.truncate(0, FIRST + 170)
    plain.truncate(0, FIRST + 170)
    assert cut.sets(40) == plain.sets(40)


def test_a_cropped_prompts_clusters_keep_the_tokens_that_are_left() -> None:
    seqs, length = Seqs(SMALL, [200]), FIRST + 90
    index = seqs.index
    assert isinstance(index, ClusterIndex)
    assert index.order is not None

    def members() -> list[list[set[int]]]:
        assert index.order is not None
        index.join()
        stops, order = index.stops[0, :, : index.seqs[0].units + 1].tolist(), index.order[0].tolist()
        return [[set(own[a:b]) for a, b in itertools.pairwise(ends)] for ends, own in zip(stops, order, strict=True)]

    before = members()
    index.truncate(0, length)
    assert members() == [[{row for row in unit if row < length} for unit in head] for head in before]


def test_cropping_again_and_again_adds_no_units() -> None:
    seqs = Seqs(SMALL, [100])
    seqs.append(200)
    index = seqs.index
    assert isinstance(index, ClusterIndex)
    units = index.seqs[0].units
    for _ in range(20):
        seqs.truncate(0, FIRST + 210)
        seqs.append(90)
    assert index.seqs[0].units <= units + 4


def test_addresses_stay_within_a_capacity() -> None:
    seqs = Seqs(SMALL, [400, 400])
    index = seqs.index
    assert isinstance(index, ClusterIndex)
    seqs.append(1)
    where = [tensor.data_ptr() for tensor in index.tensors()]
    for _ in range(10):
        seqs.append(10)
        seqs.select(64)
    assert [tensor.data_ptr() for tensor in index.tensors()] == where


def test_recall_rises_with_the_number_of_clusters() -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(60, 64, generator=g)
    keys = (centres[torch.randint(60, (2, 1200), generator=g)] + 0.5 * torch.randn(2, 1200, 64, generator=g)).contiguous()
    shares = []
    for clusters in (4, 20, 100):
        seqs = Seqs(partial(ClusterIndex, clusters=clusters), [0], group=1)
        seqs.index.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])
        query = centres[:2][None]
        found = seqs.index.select(query, 64).rows[0]
        best = torch.topk(keys @ query[0, :, :, None], 64, dim=1).indices[..., 0] + FIRST
        shares.append(sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, best, strict=True)) / 128)
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.5


def covering_in_float64(keys: Tensor, drawn: list[int], count: int) -> list[int]:
    """`covering` of one problem [T, D], key by key."""
    unit = torch.nn.functional.normalize(keys.double(), dim=1)
    chosen = list(drawn)
    for left in range(max(4, math.ceil((count - len(chosen)) / 256)), 0, -1):
        more = math.ceil((count - len(chosen)) / left)
        covered = {
            t: float((unit[chosen] @ unit[t]).max()) if unit[t].any() else 1.0 for t in range(len(keys)) if t not in chosen
        }
        ranking = sorted(covered, key=lambda t: (round(covered[t], 5), t))[: 4 * more]
        if ranking:
            last = covered[ranking[-1]]
            passed = [t for i, t in enumerate(ranking) if any(float(unit[t] @ unit[e]) > last + 1e-5 for e in ranking[:i])]
            chosen += ([t for t in ranking if t not in passed] + passed)[:more]
    return sorted(chosen)


@pytest.mark.parametrize(
    ("tokens", "dim", "few", "count"), [(300, 16, 10, 40), (60, 8, 3, 60), (200, 128, 1, 2), (50, 64, 7, 7)]
)
def test_covering_takes_the_keys_that_are_covered_worst(tokens: int, dim: int, few: int, count: int) -> None:
    keys = torch.randn(3, tokens, dim)
    keys[1, 20:] = keys[1, :20].repeat(tokens // 20, 1)[: tokens - 20]  # ties: the same 20 keys again and again
    keys[2, 11:14] = 0
    drawn = sample_positions(torch.arange(tokens), few, seed=1, layer=2, heads=3)
    found = whole(covering(keys, drawn, count))
    assert found.dtype == torch.int64
    for own, first, chosen in zip(keys, drawn.tolist(), found.tolist(), strict=True):
        assert chosen == covering_in_float64(own, first, count)
        assert len(set(chosen)) == count
        assert set(first) <= set(chosen)


def test_covering_depends_on_its_own_problem_alone_and_is_the_same_again() -> None:
    keys, drawn = torch.randn(4, 400, 64), sample_positions(torch.arange(400), 9, seed=1, layer=2, heads=4)
    deferred = whole(covering(keys, drawn, 30))
    assert torch.equal(deferred, whole(covering(keys, drawn, 30)))
    for n in range(4):
        assert torch.equal(whole(covering(keys[n : n + 1], drawn[n : n + 1], 30)), deferred[n : n + 1])


def test_many_alike_that_nothing_covers_do_not_take_all_places() -> None:
    """Of 300 keys around one direction one is enough for a round, so that 8 single ones come in as well."""
    text = torch.randn(20, 64)[torch.arange(4000) % 20] + 0.1 * torch.randn(4000, 64)
    text[1000:1300] = -text.mean(dim=0) * 5 + 0.1 * torch.randn(300, 64)
    single = torch.arange(2000, 2008)
    text[single] = torch.randn(8, 64) - text.mean(dim=0)
    drawn = torch.arange(0, 20)[None]
    chosen = whole(covering(text[None], drawn, 40))[0]
    assert torch.isin(single, chosen).all()
    assert ((chosen >= 1000) & (chosen < 1300)).any()


@pytest.mark.parametrize("start", ["covering", "random"])
def test_more_centroids_than_directions_leave_clusters_empty(start: str) -> None:
    index = ClusterIndex(Seqs(SMALL, [0]).context, tokens_per_cluster=10, start=start)  # type: ignore[arg-type]
    keys = torch.ones(2, 100, 64)
    index.build(0, FIRST, keys, keys, keys[:, :4].repeat(2, 1, 1))
    selection = index.select(torch.ones(1, 4, 64), 30)
    assert selection.counts.tolist() == [[30, 30]]
    assert torch.isfinite(index.digests[0, :, :10]).all()


@pytest.mark.parametrize("clusters", [1, 2, 60, 1000])
def test_as_many_clusters_as_tokens_or_one(clusters: int) -> None:
    seqs = Seqs(partial(ClusterIndex, clusters=clusters), [60])
    index = seqs.index
    assert isinstance(index, ClusterIndex)
    assert index.order is not None
    index.join()
    assert index.order[0, :, :60].sort(dim=1).values.tolist() == [list(range(FIRST, FIRST + 60))] * 2
    sizes = index.stops[0, :, : min(clusters, 60) + 1].diff(dim=1)
    assert sizes.sum(dim=1).tolist() == [60, 60]
    assert clusters < 60 or (sizes == 1).all()


def test_a_needle_among_repeated_text_has_clusters_of_its_own() -> None:
    """Random centroids seldom fall on five keys in 4000; their mean is then lost in a cluster of other keys."""
    dim, tokens, needle = 64, 4000, range(1234, 1239)
    generator = torch.Generator().manual_seed(3)
    text = torch.randn(20, dim, generator=generator) + 2 * torch.randn(dim, generator=generator)
    keys = text[torch.arange(tokens) % 20] + 0.3 * torch.randn(tokens, dim, generator=generator)
    keys[needle] = torch.randn(5, dim, generator=generator) * 1.3 + 2 * keys.mean(dim=0) / 2
    seqs = Seqs(SMALL, [0], heads=1, group=1)
    found, others = {}, {}
    for start in ("random", "covering"):
        index = ClusterIndex(seqs.context, tokens_per_cluster=80, start=start)
        index.build(0, FIRST, keys[None], keys[None], keys[None, -4:])
        found[start] = others[start] = 0
        for place in needle:
            rows = index.select(keys[None, place, None], 100).rows
            found[start] += int((rows == FIRST + place).sum())
        assert index.order is not None
        order, stops = (index.order[0, 0, :tokens] - FIRST).tolist(), index.stops[0, 0, : tokens // 80 + 1].tolist()
        for begin, end in itertools.pairwise(stops):
            inside = sum(place in needle for place in order[begin:end])
            others[start] += end - begin - inside if inside else 0
    assert found["covering"] == 5
    assert others["covering"] == 0
    assert found["random"] < 5
    assert others["random"] > 0


def test_draw_depends_on_seed_layer_head_and_position_only() -> None:
    positions = torch.arange(50, 450)
    drawn = sample_positions(positions, 40, seed=1, layer=2, heads=3)
    assert drawn.shape == (3, 40)
    assert all(len(set(head.tolist())) == 40 for head in drawn)
    assert torch.equal(drawn, sample_positions(positions, 40, seed=1, layer=2, heads=3))
    assert torch.equal(drawn[:2], sample_positions(positions, 40, seed=1, layer=2, heads=2))
    for seed, layer in ((2, 2), (1, 3)):
        assert not torch.equal(drawn, sample_positions(positions, 40, seed=seed, layer=layer, heads=3))
    assert not torch.equal(drawn[0], drawn[1])
    # where a position stands in the list does not matter
    later = sample_positions(positions[100:], 20, seed=1, layer=2, heads=1)[0] + 100
    ranked = [p for p in sample_positions(positions, 400, seed=1, layer=2, heads=1)[0].tolist() if p >= 100]
    assert set(later.tolist()) <= set(ranked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": 30, "clusters_per_batch": 4}, "batch is 30; it must be a multiple of clusters_per_batch, 4"),
        ({"clusters": 0}, "clusters is 0"),
        ({"distance": "l1"}, "distance is 'l1'"),
        ({"start": "first"}, "start is 'first'; it must be one of covering, random"),
        ({"policy": "best"}, "policy is 'best'"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Seqs(partial(ClusterIndex, **options), [0])  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [SMALL, partial(NodeIndex, config=NodeConfig(promote=0.1, field=TILE, nodes_per_batch=4))])
def test_what_a_batch_takes_is_loaded_without_a_trace(
    make: Callable[[IndexContext], BatchedIndex], device: torch.device
) -> None:
    """Before there are tokens, tables are written that nobody has read."""
    plain, loaded = (Seqs(make, [50, 0], device=device, build=False) for _ in range(2))
    for seqs in (plain, loaded):
        assert isinstance(seqs.index, BatchedIndex)
        seqs.index.make_room(2, 400)
    loaded.index._load()  # type: ignore[attr-defined]
    for seqs in (plain, loaded):
        keys = seqs.keys[0][:, FIRST : FIRST + 50]
        seqs.index.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])
    for _ in range(6):
        for seqs in (plain, loaded):
            seqs.append(16)
        assert plain.sets(40) == loaded.sets(40)
