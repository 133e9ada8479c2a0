"""Cluster the last tokens of all layers and sequences among themselves, in one launch.

A program has one head's tokens, from the choice of the first centroids to the map. Every iteration reads T D elements (80 KiB for
320 keys, D = 128, bf16), from the second on from L2. Launches over all heads would be some 150, and five more a layer to read its
keys and write its tables: 3 to 5 ms of the host's time for 32 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.kmeans import Distance

_TOKENS, _CLUSTERS, _BYTES = 512, 16, 512  # that a program has room for: with 64 clusters registers spill by kilobytes


class Clustered(NamedTuple):
    """Tables of a layer that hold its last tokens as `kvthaw.kernels.extend.Tables` does, and what random choices derive from: the
    position of the map's first place, and the number of the layer's first head."""

    recent: Tensor
    digests: Tensor
    stops: Tensor
    order: Tensor
    first: int
    stream: int


def fits(tokens: int, clusters: int, key_bytes: int) -> bool:
    """Return whether a program has room for so many tokens, clusters and bytes of a key."""
    return tokens <= _TOKENS and clusters <= _CLUSTERS and key_bytes <= _BYTES


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.counter_rng import GOLDEN as _GOLDEN
    from kvthaw.counter_rng import LAST as _LAST
    from kvthaw.counter_rng import SPREAD as _SPREAD
    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.tiles import load_rows

    GOLDEN, SPREAD, LAST = tl.constexpr(_GOLDEN), tl.constexpr(_SPREAD), tl.constexpr(_LAST)
    NEVER = tl.constexpr((1 << 63) - 1)

    @triton.jit
    def _mixed(x):
        # kvthaw.counter_rng.mix
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * SPREAD
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * LAST
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    @triton.jit
    def _at(x, i):
        # Element i of x [C].
        return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0), axis=0)

    @triton.jit
    def _cosines(keys, left, right, begin, ring, dim, known, BD: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr):
        # Cosines [L, R] of keys at left [L], where known, with those at right [R], -1 for none; 0 where a key is 0. And which keys
        # at left are not 0.
        found = tl.zeros([left.shape[0], right.shape[0]], tl.float32)
        square, other = tl.zeros([left.shape[0]], tl.float32), tl.zeros([right.shape[0]], tl.float32)
        for at in range(0, DP, BD):
            a = load_rows(keys + at, (begin + left) % ring, dim, known, dim - at, BD, UPCAST)
            b = load_rows(keys + at, (begin + right) % ring, dim, right >= 0, dim - at, BD, UPCAST)
            found = tl.dot(a, tl.trans(b), found, input_precision=PRECISION)
            square += tl.sum(a.to(tl.float32) * a.to(tl.float32), axis=1)
            other += tl.sum(b.to(tl.float32) * b.to(tl.float32), axis=1)
        found = found / tl.sqrt(tl.where(square > 0.0, square, 1.0))[:, None]
        return found / tl.sqrt(tl.where(other > 0.0, other, 1.0))[None, :], square > 0.0

    @triton.jit
    def _unlike(
        keys, t, covered, more, among, begin, ring, dim,
        CP: tl.constexpr, BD: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # See kvthaw.index.clusters.unlike: tokens [C], -1 for none.
        ranking = ((covered + 2.0).to(tl.int32, bitcast=True).to(tl.int64) << 31) + t
        c, worst, last = tl.arange(0, CP), tl.full([CP], -1, tl.int32), float("-inf")
        for i in range(among):
            found = ranking == tl.min(ranking, axis=0)
            worst = tl.where(c == i, tl.sum(tl.where(found, t, 0), axis=0), worst)
            last = tl.maximum(last, tl.max(tl.where(found, covered, float("-inf")), axis=0))
            ranking = tl.where(found, NEVER, ranking)
        alike, _ = _cosines(keys, worst, worst, begin, ring, dim, worst >= 0, BD, DP, UPCAST)
        like = tl.max(((alike > last) & (c[None, :] < c[:, None])).to(tl.int32), axis=1)
        rank = tl.where(c < among, c + CP * like, 2 * CP)
        other = tl.sum(tl.where(c[:, None] == c[None, :], rank[:, None], 0), axis=0)  # the same along the other axis
        before = tl.sum((other[None, :] < rank[:, None]).to(tl.int32), axis=1)
        return tl.where((before < more) & (c < among), worst, -1)

    @triton.jit
    def _probes(means, kind: tl.constexpr, COSINE: tl.constexpr, UPCAST: tl.constexpr):
        # What keys are compared with: see kvthaw.kernels.kmeans.probes.
        square = tl.sum(means * means, axis=1)
        if COSINE:
            means = means / tl.where(square > 0.0, tl.sqrt(square), 1.0)[:, None]
        m = means.to(kind)
        if UPCAST:
            m = m.to(tl.float32)
        return m, -0.5 * square

    @triton.jit
    def _members(k, m, bias, known, COUNT: tl.constexpr, L2: tl.constexpr):
        # Which of the centroids m [C, D] is nearest to each of the keys k [BM, D]: ones [BM, C], of ties the first.
        c = tl.arange(0, m.shape[0])
        found = tl.dot(k, tl.trans(m), input_precision=PRECISION)
        if L2:
            found += bias[None, :]
        found = tl.where((c < COUNT)[None, :], found, float("-inf"))
        label = tl.min(tl.where(found == tl.max(found, axis=1)[:, None], c[None, :], COUNT - 1), axis=1)
        return ((label[:, None] == c[None, :]) & known[:, None]).to(tl.int32)

    @triton.jit(do_not_specialize=["rows", "ring"])
    def _cluster(
        numbers, like, rows, dim, heads, ring,
        TOKENS: tl.constexpr, COUNT: tl.constexpr, FEW: tl.constexpr, ITERATIONS: tl.constexpr,
        TP: tl.constexpr, BM: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
        COSINE: tl.constexpr, L2: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (head, sequence of a layer). numbers: of each sequence its number, where its tokens begin in the map and their
        # first unit; then of each layer the addresses of its tables, how many elements of digests, stops and order a head has,
        # first and stream.
        h, pair = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        place, layer = numbers + 3 * (pair % rows), numbers + 3 * rows + 9 * (pair // rows)
        row, begin, before = tl.load(place) * heads + h, tl.load(place + 1), tl.load(place + 2)
        keys = tl.multiple_of(tl.load(layer).to(like.dtype), 16) + row * ring * dim
        t, c = tl.arange(0, TP), tl.arange(0, CP)

        # The keys to begin with: those drawn, then those that they cover worst.
        position = tl.load(layer + 7) + begin + t
        x = _mixed(position * GOLDEN + (tl.load(layer + 8) + h) * SPREAD)
        x = tl.where(t < TOKENS, x, NEVER)
        covered, chosen = tl.where(t < TOKENS, float("-inf"), float("inf")), tl.full([CP], -1, tl.int32)
        for i in range(FEW):
            least = x == tl.min(x, axis=0)
            chosen = tl.where(c == i, tl.sum(tl.where(least, t, 0), axis=0), chosen)
            covered, x = tl.where(least, float("inf"), covered), tl.where(least, NEVER, x)
        if COUNT > FEW:
            rounds: tl.constexpr = min(4, COUNT - FEW)
            new, known = chosen, FEW
            for i in range(rounds):
                cosines, directed = _cosines(keys, t, new, begin, ring, dim, t < TOKENS, BD, DP, UPCAST)
                nearest = tl.max(tl.where((new >= 0)[None, :], cosines, float("-inf")), axis=1)
                covered = tl.maximum(covered, tl.where(directed, nearest, 1.0))
                more = tl.cdiv(COUNT - known, rounds - i)
                among = tl.minimum(4 * more, TOKENS - known)
                new = _unlike(keys, t, covered, more, among, begin, ring, dim, CP, BD, DP, UPCAST)
                for j in range(among):
                    token = _at(new, j)
                    covered = tl.where(t == token, float("inf"), covered)
                    chosen = tl.where((c == known) & (token >= 0), token, chosen)
                    known += (token >= 0).to(tl.int32)
        after = (chosen[:, None] > chosen[None, :]) & (chosen >= 0)[None, :]
        place = tl.sum(after.to(tl.int32), axis=1)
        which = tl.sum(tl.where((place[:, None] == c[None, :]) & (chosen >= 0)[:, None], 1 + chosen[:, None], 0), axis=0) - 1
        means = load_rows(keys, (begin + which) % ring, dim, which >= 0, dim, DP, True)

        # k-means until no mean changes: then no assignment does.
        used, sizes, i, moved = means, tl.zeros([CP], tl.int32), 0, 1
        while (i < ITERATIONS) & (moved > 0):
            used, sizes = means, tl.zeros([CP], tl.int32)
            total = tl.zeros([CP, DP], tl.float32)
            m, bias = _probes(used, like.dtype.element_ty, COSINE, UPCAST)
            for at in range(0, TOKENS, BM):
                j = at + tl.arange(0, BM)
                k = load_rows(keys, (begin + j) % ring, dim, j < TOKENS, dim, DP, UPCAST)
                own = _members(k, m, bias, j < TOKENS, COUNT, L2)
                total = tl.dot(tl.trans(own).to(k.dtype), k, total, input_precision=PRECISION)
                sizes += tl.sum(own, axis=0)
            means = tl.where((sizes > 0)[:, None], total / tl.maximum(sizes, 1).to(tl.float32)[:, None], used)
            moved = tl.max(tl.max((means != used).to(tl.int32), axis=1), axis=0)
            i += 1

        # The clusters of the last assignment become the units, each in the order of the text.
        m, bias = _probes(used, like.dtype.element_ty, COSINE, UPCAST)
        starts = tl.cumsum(sizes, axis=0) - sizes
        order = tl.load(layer + 3).to(tl.pointer_type(tl.int32)) + row * tl.load(layer + 6) + begin
        upto = starts
        for at in range(0, TOKENS, BM):
            j = at + tl.arange(0, BM)
            k = load_rows(keys, (begin + j) % ring, dim, j < TOKENS, dim, DP, UPCAST)
            own = _members(k, m, bias, j < TOKENS, COUNT, L2)
            to = tl.sum(own * (upto[None, :] + tl.cumsum(own, axis=0) - own), axis=1)
            tl.store(order + to, (tl.load(layer + 7) + begin + j).to(tl.int32), mask=j < TOKENS)
            upto += tl.sum(own, axis=0)
        ends = tl.load(layer + 2).to(tl.pointer_type(tl.int32)) + row * tl.load(layer + 5) + before
        tl.store(ends + c, (begin + starts).to(tl.int32), mask=c < COUNT)
        tl.store(ends + COUNT, (begin + TOKENS).to(tl.int32))
        d = tl.arange(0, DP)
        digests = tl.load(layer + 1).to(like.dtype) + row * tl.load(layer + 4) + (before + c)[:, None] * dim + d[None, :]
        tl.store(digests, means.to(like.dtype.element_ty), mask=(c < COUNT)[:, None] & (d < dim)[None, :])


def launch(
    every: Sequence[Clustered],
    places: Sequence[tuple[int, int, int]],
    *,
    tokens: int,
    count: int,
    few: int,
    distance: Distance,
    iterations: int,
) -> None:
    """Make `count` clusters of the last `tokens` keys of some sequences in all layers, as `kvthaw.index.batches.form` does for
    ClusterIndex, and write them into the tables. No host sync.

    places: of each sequence its number, where these tokens begin in the map, and at which unit. few: so many first centroids are
    drawn, the others are keys that these cover worst. Layers' tables are alike and contiguous; `fits` must hold. Without places the
    kernel is compiled, and nothing else happens.
    """
    recent = every[0].recent
    (_, heads, ring, dim), numbers = recent.shape, [number for place in places for number in place]
    for each in every:
        tables = each[:4]
        assert all(table.is_contiguous() for table in tables)
        assert each.recent.shape[1:] == recent.shape[1:]
        assert each.recent.dtype == each.digests.dtype == recent.dtype
        numbers += [table.data_ptr() for table in tables]
        numbers += [each.digests.shape[2] * dim, each.stops.shape[2], each.order.shape[2], each.first, each.stream]
    wide = recent.dtype.itemsize > 2
    _cluster[(heads, len(places) * len(every))](
        torch.tensor(numbers).to(recent.device, non_blocking=True), recent, len(places), dim, heads, ring,
        TOKENS=tokens, COUNT=count, FEW=few, ITERATIONS=iterations,
        TP=max(16, triton.next_power_of_2(tokens)), BM=32 if wide else 64, CP=max(16, triton.next_power_of_2(count)),
        DP=max(16, triton.next_power_of_2(dim)), BD=16, COSINE=distance == "cosine", L2=distance == "l2",
        UPCAST=recent.device.type == "cpu" or wide, num_warps=4, num_stages=2,
    )  # fmt: skip
