"""Attention of one query a head over keys on the device, split along the keys and merged; static shapes, no sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.merge import merge
from kvthaw.types import Partial


def definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    log_weight: Tensor | None = None,
    partials: Sequence[Partial] = (),
) -> Partial:
    """softmax over the visible keys, in float32.

    query [B, Hq, D]; keys, values [B, H, N, D], Hq a multiple of H. A lane sees the places starts[b] <= n < lengths[b] ([B]
    int32; None: 0 and N) that `visible` [B, H, N] bool allows; the others may hold anything, NaN included. softcap c: scores
    become c tanh(score / c). log_weight [B, Hq, N] is added to the logits then. sinks [Hq]: logits that take weight and give
    nothing (gpt-oss). partials: attention over further, disjoint tokens. lse counts sinks and partials; a head that sees
    nothing gives 0 with lse -inf.
    """
    batch, heads, n, dim = keys.shape
    place = torch.arange(n, device=keys.device)
    seen = torch.ones((batch, heads, n), dtype=torch.bool, device=keys.device) if visible is None else visible
    if lengths is not None:
        seen = seen & (place < lengths[:, None, None])
    if starts is not None:
        seen = seen & (place >= starts[:, None, None])
    k, v = (torch.where(seen[..., None], x.float(), 0.0) for x in (keys, values))
    scores = torch.einsum("bhgd,bhnd->bhgn", query.float().reshape(batch, heads, -1, dim), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if log_weight is not None:
        scores = scores + log_weight.reshape(scores.shape)
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    out = torch.einsum("bhgn,bhnd->bhgd", weights, v)
    parts = [Partial(out.reshape(query.shape), lse.reshape(query.shape[:2])), *partials]
    if sinks is not None:
        parts.append(Partial(torch.zeros_like(parts[0].out), sinks.float().expand(query.shape[:2])))
    return Partial(*merge([p.out for p in parts], [p.lse for p in parts]))


if TYPE_CHECKING:
    _split: Any
    _merge: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl

    _LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _split(
        query,
        keys,
        values,
        visible,
        lengths,
        starts,
        log_weight,
        acc_out,
        lse_out,
        q_lane,
        q_head,
        k_lane,
        k_head,
        k_row,
        v_lane,
        v_head,
        v_row,
        m_lane,
        m_head,
        m_row,
        w_lane,
        w_head,
        n,
        scale,
        softcap,
        HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK_G: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        UPCAST: tl.constexpr,
    ):
        # Program (lane and KV head, split): the query heads of one KV head over one run of its keys. Logits in base 2. The runs
        # share what the lane has evenly, in whole blocks; a program without a run leaves lse -inf and its acc unwritten.
        pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        b, h = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
        first, last = 0, n
        if starts is not None:
            first = tl.maximum(tl.load(starts + b), 0)
        if lengths is not None:
            last = tl.minimum(tl.load(lengths + b), n)
        run = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK_N) * BLOCK_N
        begin = first + split * run
        end = tl.minimum(begin + run, last)

        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        is_head, is_dim = g < GROUP, d < DIM
        heads = h * GROUP + g
        q = tl.load(
            query + b * q_lane + heads[:, None] * q_head + d[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0
        )
        q = q.to(tl.float32) if UPCAST else q.to(keys.dtype.element_ty)
        keys += b * k_lane + h * k_head
        values += b * v_lane + h * v_head
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)  # added up over the block's places only at the end
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        offset = tl.arange(0, BLOCK_N)
        if visible is not None:  # a block ahead, or every block would wait for it
            visible += b * m_lane + h * m_head
            ahead = tl.load(visible + (begin + offset).to(tl.int64) * m_row, mask=begin + offset < end, other=0)
        for at in range(begin, end, BLOCK_N):
            place = at + offset
            inside = place < end
            row = place.to(tl.int64)[:, None]
            both = inside[:, None] & is_dim[None, :]
            k = tl.load(keys + row * k_row + d[None, :], mask=both, other=0.0)
            v = tl.load(values + row * v_row + d[None, :], mask=both, other=0.0)
            seen = inside
            if visible is not None:  # does not delay the loads of rows; it blanks them afterwards
                seen = ahead != 0
                v = tl.where(seen[:, None], v, 0.0)
                later = place + BLOCK_N
                ahead = tl.load(visible + later.to(tl.int64) * m_row, mask=later < end, other=0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            if softcap is not None:
                score = score * (scale / softcap)
                score = (2.0 * tl.sigmoid(2.0 * score) - 1.0) * (softcap * _LOG2E)
            else:
                score = score * (scale * _LOG2E)
            if log_weight is not None:
                where = log_weight + b * w_lane + heads[:, None] * w_head + place[None, :]
                score += tl.load(where, mask=is_head[:, None] & inside[None, :], other=0.0) * _LOG2E
            score = tl.where(seen[None, :], score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weight = tl.exp2(score - shift[:, None])
            decay = tl.exp2(top - shift)
            sums = sums * decay[:, None] + weight
            acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="tf32x3")
            top = new

        total = tl.sum(sums, 1)
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        lse = tl.where(some, tl.where(some, top, 0.0) + tl.log2(divisor), float("-inf"))
        part = (b * HEADS * GROUP + heads) * splits + split
        tl.store(lse_out + part, lse, mask=is_head)
        filled = (is_head & some)[:, None] & is_dim[None, :]
        tl.store(acc_out + part[:, None] * DIM + d[None, :], acc / divisor[:, None], mask=filled)

    @triton.jit
    def _merge(
        acc,
        lse,
        sinks,
        more_out,
        more_lse,
        out,
        lse_out,
        q_heads,
        splits,
        DIM: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        # Program (lane and query head, piece of the head's width). more: attention over other tokens, natural log.
        row = tl.program_id(0).to(tl.int64)
        s, d = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        is_dim = d < DIM
        parts = tl.load(lse + row * splits + s, mask=s < splits, other=float("-inf"))
        filled = parts > float("-inf")
        where = acc + (row * splits + s)[:, None] * DIM + d[None, :]
        piece = tl.load(where, mask=filled[:, None] & is_dim[None, :], other=0.0)
        top = tl.max(parts, 0)
        if sinks is not None:
            sink = tl.load(sinks + row % q_heads).to(tl.float32) * _LOG2E
            top = tl.maximum(top, sink)
        if more_lse is not None:
            more = tl.load(more_lse + row) * _LOG2E
            top = tl.maximum(top, more)
        top = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(parts - top)
        total = tl.sum(weight, 0)
        mixed = tl.sum(weight[:, None] * piece, 0)
        if sinks is not None:
            total += tl.exp2(sink - top)
        if more_lse is not None:
            share = tl.exp2(more - top)
            total += share
            mixed += share * tl.where(share > 0, tl.load(more_out + row * DIM + d, mask=is_dim, other=0.0), 0.0)
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        tl.store(out + row * DIM + d, mixed / divisor, mask=is_dim)
        if lse_out is not None:
            tl.store(lse_out + row, tl.where(some, (top + tl.log2(divisor)) / _LOG2E, float("-inf")))


@dataclass(frozen=True, slots=True)
class Split:
    """How the keys are dealt to programs: `splits` programs a lane and KV head, each over blocks of `block` keys."""

    block: int
    splits: int
    warps: int
    stages: int


def split_for(pairs: int, n: int, dim: int, itemsize: int, multiprocessors: int) -> Split:
    """The split of `pairs` (lane, KV head) pairs of n keys each.

    A step reads pairs * n * 2 * dim * itemsize bytes once: 4 MiB for 8 heads of 1k keys of 128 in bf16, 1 us at 4.3 TB/s; 512
    MiB for 128k, 125 us. The small one is bound by latency, so all loads should be in flight at once: blocks shrink until there
    are about 100 programs, and each has one block. The large one is bound by memory: a block is 32 KiB of K and V, three stages
    of it in shared memory, two programs a multiprocessor, one wave of them. A split costs 4 * dim bytes written and read for
    each query head: 0.5 MiB for 33 splits of 32 heads, which stay in the L2 cache.
    """
    row = 2 * triton_block(dim) * itemsize
    block = min(128, max(16, 32768 // row))
    while block > 16 and pairs * -(-n // block) < 100:
        block //= 2
    splits = max(1, min(2 * multiprocessors // pairs, -(-n // block)))
    return Split(block, splits, warps=2 if block * dim * itemsize <= 4096 else 4, stages=3)


def triton_block(size: int, least: int = 1) -> int:
    """The smallest power of two that is no less than either."""
    return 1 << (max(size, least) - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def flash_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    log_weight: Tensor | None = None,
    partials: Sequence[Partial] = (),
) -> Tensor:
    """As `definition`, [B, Hq, D] in the dtype of query. Keys outside [starts, lengths) are not read."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(query, keys, values, scale, visible, lengths, starts, softcap, sinks, log_weight, partials, out, None)
    return out


def flash_decode_partial(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    log_weight: Tensor | None = None,
    partials: Sequence[Partial] = (),
) -> Partial:
    """As `definition`, in float32 with its lse, to be merged with more."""
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    _launch(query, keys, values, scale, visible, lengths, starts, softcap, sinks, log_weight, partials, out, lse)
    return Partial(out, lse)


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    visible: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    log_weight: Tensor | None,
    partials: Sequence[Partial],
    out: Tensor,
    lse: Tensor | None,
) -> None:
    batch, q_heads, dim = query.shape
    heads, n = keys.shape[1:3]
    assert keys.shape == values.shape == (batch, heads, n, dim)
    assert q_heads % heads == 0, f"{q_heads} query heads on {heads} KV heads"
    assert query.stride(2) == keys.stride(3) == values.stride(3) == 1, "the last dimension is contiguous"
    assert keys.dtype == values.dtype, f"{keys.dtype} and {values.dtype}"
    for bound in (lengths, starts):
        assert bound is None or (bound.dtype == torch.int32 and bound.shape == (batch,))
        assert bound is None or bound.is_contiguous()
    if visible is not None:
        assert visible.dtype == torch.bool
        assert visible.shape == (batch, heads, n)
    if log_weight is not None:
        assert log_weight.dtype == torch.float32
        assert log_weight.shape == (batch, q_heads, n)
        assert log_weight.stride(2) == 1
    if sinks is not None:
        assert sinks.shape == (q_heads,)
        assert sinks.is_contiguous()
    more = partials[0] if len(partials) == 1 else None
    if len(partials) > 1:
        more = Partial(*merge([p.out for p in partials], [p.lse for p in partials]))
    more_out, more_lse = (None, None) if more is None else (more.out.float().contiguous(), more.lse.float().contiguous())

    split = split_for(batch * heads, n, dim, keys.dtype.itemsize, _multiprocessors(query.device))
    acc = torch.empty((batch, q_heads, split.splits, dim), dtype=torch.float32, device=query.device)
    parts = torch.empty((batch, q_heads, split.splits), dtype=torch.float32, device=query.device)
    group, interpreted = q_heads // heads, query.device.type == "cpu"
    if interpreted and sinks is not None:  # where bfloat16 is not for scalars and not for products
        sinks = sinks.float()
    _split[(batch * heads, split.splits)](
        query,
        keys,
        values,
        visible,
        lengths,
        starts,
        log_weight,
        acc,
        parts,
        query.stride(0),
        query.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0, 0) if visible is None else visible.stride()),
        *((0, 0) if log_weight is None else log_weight.stride()[:2]),
        n,
        scale,
        softcap,
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        BLOCK_G=triton_block(group, 16),
        BLOCK_D=triton_block(dim, 16),
        BLOCK_N=split.block,
        UPCAST=interpreted,
        num_warps=split.warps,
        num_stages=split.stages,
    )
    width = 32
    _merge[(batch * q_heads, -(-dim // width))](
        acc,
        parts,
        sinks,
        more_out,
        more_lse,
        out,
        lse,
        q_heads,
        split.splits,
        DIM=dim,
        BLOCK_S=triton_block(split.splits),
        BLOCK_D=width,
        num_warps=4 if split.splits <= 64 else 8,
    )
