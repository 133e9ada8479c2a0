"""k-means over keys, for many problems (heads, batches of tokens) at once (ClusterKV, sections III-B and IV-B).

An iteration assigns and averages. Assignment is a matrix product with its argmax: 2 N T C D operations (8 heads of 128k
keys, C = 1638, D = 128: 440 GFLOP, 0.55 ms at 795 TFLOP/s), T D elements read per problem and T labels written; the [T, C]
scores stay in registers. Averaging is deterministic and loses no updates. First comes a counting sort of the tokens by
label: T times a block's tokens integer comparisons (0.5 G above), and a prefix sum over N C blocks counters. Then one
program per cluster adds its keys in token order in float32, 268 MB read above. 20 iterations take 14 ms at these rates.
Nothing syncs the host: a problem whose labels did not change skips its products.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device, nvidia

Distance = Literal["cosine", "l2", "inner"]
_Made = TypeVar("_Made")
Clusters = tuple[Tensor, Tensor, Tensor]
SCORES = 1 << 22
"""float32 similarities that a definition holds at once."""


def probes(centroids: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
    """Return m [N, C, D] and b [N, C] so that the nearest centroid of a key k is argmax k.m + b.

    centroids: [N, C, D] float32.

    cosine: m = mu / |mu|, 0 where mu is 0. l2: |k - mu|^2 is smallest where k.mu - |mu|^2 / 2 is largest.
    inner: k.mu.
    """
    if distance == "cosine":
        norm = centroids.norm(dim=2, keepdim=True)
        return torch.where(norm > 0, centroids / norm, 0.0), torch.zeros_like(norm[..., 0])
    half = -0.5 * centroids.square().sum(dim=2)
    return centroids, half if distance == "l2" else torch.zeros_like(half)


def whole(pieces: Generator[None, None, _Made]) -> _Made:
    """Run all pieces of a work, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            made: _Made = end.value
            return made


def definition_in_pieces(
    keys: Tensor, start: Tensor, *, distance: Distance, iterations: int = 20
) -> Generator[None, None, Clusters]:
    """Cluster keys [N, T, D] around C centroids, one iteration at a time.

    start: [N, C] int64; centroids are initially keys[n, start[n]].

    An iteration assigns every key to its nearest centroid (ties go to the first). It then replaces every centroid by the
    mean of its keys. Iterations end once no assignment changes, or after `iterations`. An empty cluster keeps its centroid.
    Returns the means [N, C, D] float32 and the clusters from which they were computed, in the form of `grouped`.
    Similarities are computed in blocks.
    """
    problems, tokens, dim = keys.shape
    count = start.shape[1]
    centroids = keys.gather(1, start[:, :, None].expand(-1, -1, dim)).float()
    labels = torch.full((problems, tokens), -1, dtype=torch.int64, device=keys.device)
    block = max(1, SCORES // max(1, problems * count))
    ones = torch.ones((), dtype=torch.float32, device=keys.device).expand(problems, tokens)
    for _ in range(iterations):
        m, b = probes(centroids, distance)
        nearest = torch.empty_like(labels)
        for at in range(0, tokens, block):
            nearest[:, at : at + block] = torch.baddbmm(b[:, None], keys[:, at : at + block].float(), m.transpose(1, 2)).argmax(
                dim=2
            )
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sums = torch.zeros_like(centroids)
        for at in range(0, tokens, block):
            part = labels[:, at : at + block, None].expand(-1, -1, dim)
            sums.scatter_add_(1, part, keys[:, at : at + block].float())
        sizes = torch.zeros((problems, count), device=keys.device).scatter_add_(1, labels, ones)[..., None]
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
        yield
    return centroids, *grouped(labels, count)


def grouped(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort tokens by label.

    labels [N, T] int64 -> token order [N, T] int32, stable, and the boundaries of the `count` clusters in it, [N, count + 1]
    int32.
    """
    order = torch.sort(labels, dim=1, stable=True).indices
    sizes = torch.zeros((labels.shape[0], count + 1), dtype=torch.int64, device=labels.device)
    sizes.scatter_add_(1, labels + 1, torch.ones_like(labels))
    return order.int(), sizes.cumsum(dim=1).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.tiles import load_rows

    # labels, ranks and order are slices of one tensor, and changed is a row of one: whether their addresses are multiples of 16
    # depends on the numbers of tokens and problems, so kernels are not specialized on it.
    @triton.jit(do_not_specialize=["tokens", "count"], do_not_specialize_on_alignment=["labels", "changed"])
    def _assign(
        keys, probes, bias, labels, changed, tokens, count, dim,
        BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, L2: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (block of keys; problem) loops over all centroids. changed: this iteration's flags, then the next one's.
        n = tl.program_id(1).to(tl.int64)
        if tl.load(changed + n) != 0:
            t, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
            known = t < tokens
            k = load_rows(keys, n * tokens + t, dim, known, dim, DP, UPCAST)
            best, where = tl.full([BM, BN], float("-inf"), tl.float32), tl.zeros([BM, BN], tl.int32)
            for start in range(0, count, BN):
                c = start + i
                m = load_rows(probes, n * count + c, dim, c < count, dim, DP, UPCAST)
                found = tl.dot(k, tl.trans(m), input_precision=PRECISION)
                if L2:
                    found += tl.load(bias + n * count + c, mask=c < count, other=0.0)[None, :]
                if start + BN > count:
                    found = tl.where((c < count)[None, :], found, float("-inf"))
                better = found > best
                best = tl.maximum(best, found)
                where = tl.where(better, start, where)
            top = tl.max(best, axis=1)
            label = tl.min(tl.where(best == top[:, None], where + i[None, :], count - 1), axis=1)
            place = labels + n * tokens + t
            moved = tl.where(known & (tl.load(place, mask=known, other=-1) != label), 1, 0)
            tl.store(place, label, mask=known)
            some = tl.max(moved, axis=0)
            if some > 0:
                tl.atomic_max(changed + tl.num_programs(1) + n, some)

    @triton.jit(do_not_specialize=["tokens", "count", "blocks", "block"], do_not_specialize_on_alignment=["labels", "ranks"])
    def _rank(labels, ranks, counts, tokens, count, blocks, block, TILE: tl.constexpr, CHUNK: tl.constexpr):
        # Program (tile of tokens; problem). ranks: how many earlier tokens of the same block of tokens have the token's label.
        # counts [N, C, blocks] += tokens with that label in the block.
        n = tl.program_id(1).to(tl.int64)
        first = tl.program_id(0) * TILE
        t = first + tl.arange(0, TILE)
        known = t < tokens
        label = tl.load(labels + n * tokens + t, mask=known, other=-1)
        rank = tl.zeros([TILE], tl.int32)
        for start in range(first // block * block, tl.minimum(first + TILE, tokens), CHUNK):
            j = start + tl.arange(0, CHUNK)
            other = tl.load(labels + n * tokens + j, mask=j < tokens, other=-2)
            rank += tl.sum(((label[:, None] == other[None, :]) & (j[None, :] < t[:, None])).to(tl.int32), axis=1)
        tl.store(ranks + n * tokens + t, rank, mask=known)
        tl.atomic_add(counts + (n * count + label) * blocks + first // block, 1, mask=known)

    @triton.jit(
        do_not_specialize=["tokens", "count", "blocks", "block"], do_not_specialize_on_alignment=["labels", "ranks", "order"]
    )
    def _sort(labels, ranks, upto, order, tokens, count, blocks, block, TILE: tl.constexpr):
        # Program (tile of tokens; problem). upto: inclusive prefix sums of counts over all problems; order [N, T].
        n = tl.program_id(1).to(tl.int64)
        t = tl.program_id(0) * TILE + tl.arange(0, TILE)
        known = t < tokens
        label = tl.load(labels + n * tokens + t, mask=known, other=0)
        cell = (n * count + label) * blocks + t // block
        before = tl.load(upto + cell - 1, mask=known & (cell > 0), other=0)
        tl.store(order + before + tl.load(ranks + n * tokens + t, mask=known, other=0), t, mask=known)

    @triton.jit(do_not_specialize=["tokens", "count", "blocks"], do_not_specialize_on_alignment=["order"])
    def _average(
        keys, order, upto, means, probes, bias, tokens, count, dim, blocks,
        CHUNK: tl.constexpr, DP: tl.constexpr, COSINE: tl.constexpr, L2: tl.constexpr,
    ):  # fmt: skip
        # Program (cluster; problem).
        n, c, d = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, DP)
        cell = (n * count + c) * blocks
        start = tl.load(upto + cell - 1, mask=cell > 0, other=0)
        stop = tl.load(upto + cell + blocks - 1)
        if stop > start:
            total = tl.zeros([CHUNK, DP], tl.float32)
            for at in range(start, stop, CHUNK):
                i = at + tl.arange(0, CHUNK)
                token = tl.load(order + i, mask=i < stop, other=0)
                inside = (i < stop)[:, None] & (d < dim)[None, :]
                total += tl.load(keys + (n * tokens + token[:, None]) * dim + d[None, :], mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(total, axis=0) / (stop - start).to(tl.float32)
            place = (n * count + c) * dim + d
            tl.store(means + place, mean, mask=d < dim)
            square = tl.sum(mean * mean, axis=0)
            if COSINE:
                mean = mean / tl.where(square > 0.0, tl.sqrt(square), 1.0)
            tl.store(probes + place, mean.to(probes.dtype.element_ty), mask=d < dim)
            if L2:
                tl.store(bias + n * count + c, -0.5 * square)


def tiling(dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Choose the tiles of a kernel that compares keys of `dim` channels with centroids: keys (BM) and centroids (BN) per step,
    padded channels (DP, at least the 16 that tl.dot requires), warps, and whether it multiplies in float32 (UPCAST)."""
    padded = max(16, triton.next_power_of_2(dim))
    row = padded * dtype.itemsize
    tall, broad = (128, 64) if row <= 256 else (64, 64) if row <= 512 else (64, 16)
    found = {"BM": tall, "BN": broad, "DP": padded, "UPCAST": device.type == "cpu" or dtype == torch.float32, "num_warps": 8}
    # This limit allows two programs per multiprocessor and causes no spills.
    return found | ({"maxnreg": 128} if row <= 512 and dtype.itemsize == 2 and nvidia(device) else {})


def launch_in_pieces(
    keys: Tensor, start: Tensor, *, distance: Distance, iterations: int = 20
) -> Generator[None, None, Clusters]:
    """Launch the Triton kernels, without a host sync; arguments and result as in `definition_in_pieces`. With 16-bit
    keys the centroids are compared in 16 bits too."""
    keys = keys.contiguous()
    problems, tokens, dim = keys.shape
    count = start.shape[1]
    means = keys.gather(1, start[:, :, None].expand(-1, -1, dim)).float()
    m, bias = probes(means, distance)
    m, bias = m.to(keys.dtype).contiguous(), bias.contiguous()
    like = {"dtype": torch.int32, "device": keys.device}
    labels, ranks, order = torch.full((3, problems, tokens), -1, **like)  # type: ignore[call-overload]
    changed = torch.zeros((iterations + 1, problems), **like)  # type: ignore[call-overload]
    changed[0] = 1
    tile = 128
    block = min(4096, max(tile, triton.next_power_of_2(triton.cdiv(tokens, 256))))
    blocks = triton.cdiv(tokens, block)
    counts = torch.empty((problems, count, blocks), **like)  # type: ignore[call-overload]
    shape = tiling(dim, keys.dtype, keys.device)
    metric = {"L2": distance == "l2"}
    tiles = (triton.cdiv(tokens, tile), problems)
    upto = counts
    for i in range(iterations):
        _assign[(triton.cdiv(tokens, shape["BM"]), problems)](
            keys, m, bias, labels, changed[i:], tokens, count, dim, **shape, **metric
        )
        counts.zero_()
        _rank[tiles](labels, ranks, counts, tokens, count, blocks, block, TILE=tile, CHUNK=32, num_warps=4)
        upto = torch.cumsum(counts.view(-1), dim=0, dtype=torch.int32)
        _sort[tiles](labels, ranks, upto, order, tokens, count, blocks, block, TILE=tile)
        _average[(count, problems)](
            keys, order, upto, means, m, bias, tokens, count, dim, blocks,
            CHUNK=32, DP=shape["DP"], COSINE=distance == "cosine", **metric, num_warps=4,
        )  # fmt: skip
        yield
    ends = upto.view(problems, count, blocks)[:, :, -1] - torch.arange(problems, device=keys.device)[:, None] * tokens
    return means, order, torch.nn.functional.pad(ends, (1, 0)).int()


kmeans_in_pieces = by_device(launch_in_pieces, definition_in_pieces)
