"""Digests of tree nodes (IceCache): the mean, outliers and spread of each node's keys.

One program per node. It reads its keys, 20 on average, once from memory, and twice more per outlier from caches. In total
these are T D elements: 268 MB for 8 heads of 128k keys, D = 128, bf16, 65 us at 4200 GB/s. The distances to the points
chosen so far, 4 bytes per key, are kept in a scratch tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device

TAIL = 8
"""Elements after the points of a digest: the spread, then padding that keeps the next digest aligned."""
TIE = 1e-4
"""Relative difference below which squared distances count as equal, as in native/tree_digest.cpp."""
_KEYS = 1 << 17  # keys that the definition processes at once


def row_width(dim: int, outliers: int) -> int:
    """Return the number of elements of a digest."""
    return dim * (1 + outliers) + TAIL


def definition(keys: Tensor, order: Tensor, stops: Tensor, outliers: int) -> tuple[Tensor, Tensor]:
    """Compute digests of nodes and a new order of their keys.

    keys: [N, T, D]. Returns digests [N, C, (1 + outliers) D + 8] in the dtype of keys, and the order [N, T] int32.

    Node c of problem n holds keys order[n, stops[n, c] : stops[n, c + 1]]; order [N, T] int32; stops [N, C + 1] int32 from 0 to
    T. A digest is the mean, the outliers and the spread of a node: the root mean square of the distances to the mean, divided
    by sqrt(D). The first outlier is the key farthest from the mean; each further one is the farthest from the mean and all
    earlier outliers. Ties go to the first key; outliers repeat if a node has too few keys. Digests of empty nodes are
    undefined. In the returned order the outliers come first in their nodes, so that they are kept if a node is cut. Does not
    sync the host.
    """
    problems, tokens, dim = keys.shape
    digests, orders, block = [], [], max(1, _KEYS // tokens)
    for at in range(0, problems, block):
        where, sizes = order[at : at + block].long(), stops[at : at + block].diff(dim=1).long()
        own = keys[at : at + block].gather(1, where[:, :, None].expand(-1, -1, dim)).flatten(0, 1)
        found, odd = _digests(own, sizes.flatten(), outliers)
        place = torch.arange(tokens, device=keys.device).expand(len(where), -1).contiguous()
        node = torch.searchsorted(sizes.cumsum(dim=1), place, right=True)
        digests.append(found.unflatten(0, (len(where), -1)).to(keys.dtype))
        orders.append(where.gather(1, torch.sort(2 * node + (~odd).view_as(node), dim=1, stable=True).indices).int())
    return torch.cat(digests), torch.cat(orders)


def _digests(keys: Tensor, sizes: Tensor, outliers: int) -> tuple[Tensor, Tensor]:
    """Compute the digests of nodes of sizes [C] int64 from keys [T, D], sorted by node, and which keys are outliers, [T] bool."""
    tokens, dim = keys.shape
    place = torch.arange(tokens, device=keys.device)
    node = torch.searchsorted(sizes.cumsum(dim=0), place, right=True)
    keys, some = keys.float(), sizes.clamp(min=1)[:, None]

    def each(kind: str, values: Tensor) -> Tensor:
        reduced: Tensor = torch.segment_reduce(values, kind, lengths=sizes, unsafe=True)
        return reduced

    mean = each("sum", keys) / some
    apart = (keys - mean[node]).square().sum(dim=1)
    spread = (each("sum", apart)[:, None] / (some * dim)).sqrt()
    points, odd = [mean], torch.zeros(tokens + 1, dtype=torch.bool, device=keys.device)
    for _ in range(outliers):
        farthest = torch.where(apart * (1 + TIE) >= each("max", apart)[node], place, tokens)
        which = each("min", farthest.float()).clamp(max=tokens).long()  # tokens: no key
        odd[which] = True
        points.append(keys[which.clamp(max=tokens - 1)])
        apart = torch.minimum(apart, (keys - points[-1][node]).square().sum(dim=1))
    tail = torch.nn.functional.pad(spread, (0, TAIL - 1))
    return torch.cat((*points, tail), dim=1), odd[:tokens]


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _load(keys, order, end, at, dim, CHUNK: tl.constexpr, DP: tl.constexpr):
        # Load keys at .. at + CHUNK of a node in float32, 0 past its end.
        i, d = at + tl.arange(0, CHUNK), tl.arange(0, DP)
        here = i < end
        place = tl.load(order + i, mask=here, other=0).to(tl.int64)
        source = keys + place[:, None] * dim + d[None, :]
        return tl.load(source, mask=here[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)

    @triton.jit(do_not_specialize=["tokens", "nodes", "order_stride", "stops_stride"])
    def _digest(keys, order, stops, apart, out, moved, tokens, nodes, dim, width, order_stride, stops_stride, tie,
                OUTLIERS: tl.constexpr, OP: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
                DP: tl.constexpr):  # fmt: skip
        c, base = tl.program_id(0), tl.program_id(1).to(tl.int64)
        begin = tl.load(stops + base * stops_stride + c)
        end = tl.load(stops + base * stops_stride + c + 1)
        d, i, o = tl.arange(0, DP), tl.arange(0, CHUNK), tl.arange(0, OP)
        count = tl.maximum(end - begin, 1)
        to = out + (base * nodes + c) * width
        keys += base * tokens * dim
        order += base * order_stride
        moved += base * tokens
        apart += base * tokens
        mean = tl.zeros([DP], tl.float32)
        for at in range(begin, end, CHUNK):
            mean += tl.sum(_load(keys, order, end, at, dim, CHUNK, DP), axis=0)
        mean /= count
        tl.store(to + d, mean, mask=d < dim)
        square = tl.zeros([], tl.float32)
        for at in range(begin, end, CHUNK):
            key = _load(keys, order, end, at, dim, CHUNK, DP)
            far = tl.sum(tl.where((d < dim)[None, :], (key - mean[None, :]) * (key - mean[None, :]), 0.0), axis=1)
            tl.store(apart + at + i, far, mask=at + i < end)
            square += tl.sum(tl.where(at + i < end, far, 0.0))
        t = tl.arange(0, TAIL)
        tl.store(to + (1 + OUTLIERS) * dim + t, tl.where(t == 0, tl.sqrt(square / (count * dim)), 0.0))
        odd = tl.full([OP], -1, tl.int32)
        for p in tl.static_range(OUTLIERS):
            tl.debug_barrier()  # each thread reads what other threads wrote
            top = tl.full([], -1.0, tl.float32)
            for at in range(begin, end, CHUNK):
                top = tl.maximum(top, tl.max(tl.load(apart + at + i, mask=at + i < end, other=-1.0)))
            which = end
            for at in range(begin, end, CHUNK):
                far = tl.load(apart + at + i, mask=at + i < end, other=-1.0)
                which = tl.minimum(which, tl.min(tl.where((at + i < end) & (far * (1 + tie) >= top), at + i, end)))
            odd = tl.where((o == p) & (which < end) & (tl.sum((odd == which).to(tl.int32)) == 0), which, odd)
            source = tl.load(order + which, mask=which < end, other=0).to(tl.int64)
            point = tl.load(keys + source * dim + d, mask=(d < dim) & (which < end), other=0.0)
            tl.store(to + (1 + p) * dim + d, point, mask=d < dim)
            if p + 1 < OUTLIERS:
                tl.debug_barrier()
                point = point.to(tl.float32)
                for at in range(begin, end, CHUNK):
                    key = _load(keys, order, end, at, dim, CHUNK, DP)
                    far = tl.sum(tl.where((d < dim)[None, :], (key - point[None, :]) * (key - point[None, :]), 0.0), axis=1)
                    known = tl.load(apart + at + i, mask=at + i < end, other=0.0)
                    tl.store(apart + at + i, tl.minimum(far, known), mask=at + i < end)
        many = tl.sum((odd >= 0).to(tl.int32))
        for at in range(begin, end, CHUNK):
            j = at + i
            first = tl.sum((j[:, None] == odd[None, :]).to(tl.int32), axis=1) > 0
            before = tl.sum(((odd >= 0)[None, :] & (odd[None, :] < j[:, None])).to(tl.int32), axis=1)
            target = tl.where(first, begin + before, j + many - before)
            place = tl.load(order + j, mask=j < end, other=0)
            tl.store(moved + target, place, mask=j < end)


def launch(keys: Tensor, order: Tensor, stops: Tensor, outliers: int) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as in `definition`."""
    problems, tokens, dim = keys.shape
    nodes = stops.shape[1] - 1
    keys = keys.contiguous()
    assert stops.dtype == torch.int32 and stops.stride(1) == 1, f"stops are {stops.dtype} of strides {stops.stride()}"
    assert order.dtype == torch.int32 and order.stride(1) == 1, f"the order is {order.dtype} of strides {order.stride()}"
    out = keys.new_empty((problems, nodes, row_width(dim, outliers)))
    moved = torch.empty((problems, tokens), dtype=torch.int32, device=keys.device)
    apart = torch.empty((problems, tokens), dtype=torch.float32, device=keys.device)
    _digest[(nodes, problems)](
        keys, order, stops, apart, out, moved, tokens, nodes, dim, out.shape[2],
        order.stride(0), stops.stride(0), TIE, OUTLIERS=outliers, OP=max(1, triton.next_power_of_2(outliers)), TAIL=TAIL, CHUNK=32,
        DP=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return out, moved


node_digests = by_device(launch, definition)
