"""Attention that the queries of an observation window pay to each key: the token scores of PRKV and SnapKV.

Softmax needs its denominators first, so the keys are read twice, N T D elements each time. Operations are 4 N W T D in
total. At 128k tokens of 8 heads, D = 128, 64 queries of 4 heads each: 2 x 268 MB (125 us at 4300 GB/s) and 275 GFLOP (0.35
ms at 795 TFLOP/s), plus 2 x 268M exponentials. The full score matrix is never stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device

_LN2 = math.log(2)
_SCORES = 1 << 19  # float32 scores per problem that the definition holds at once


def definition(queries: Tensor, keys: Tensor, weights: Tensor, *, scale: float) -> Tensor:
    """Compute sum_w weights[w] softmax_t(scale q_w.k_t), [N, T] float32, in blocks of keys.

    queries [N, W, D]; keys [N, T, D]; weights [N, W] or [W] float32, not negative. A query of weight 0 may hold any finite
    values.
    """
    return mass_definition(queries, keys, log_sums_definition(queries, keys, scale=scale), weights, scale=scale)


def log_sums_definition(queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """Compute log sum_t exp(scale q_w.k_t), [N, W] float32, in blocks of keys; arguments as of `definition`."""
    q = queries.float() * scale
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for at in _blocks(q, keys):
        lse = torch.logaddexp(lse, torch.logsumexp(q @ keys[:, at].float().transpose(1, 2), dim=2))
    return lse


def mass_definition(queries: Tensor, keys: Tensor, lse: Tensor, weights: Tensor, *, scale: float) -> Tensor:
    """Compute `definition` of some of the keys, with the log_sums [N, W] of all."""
    q = queries.float() * scale
    out = torch.empty((q.shape[0], keys.shape[1]), device=q.device)
    for at in _blocks(q, keys):
        part = torch.exp(q @ keys[:, at].float().transpose(1, 2) - lse[..., None])
        out[:, at] = torch.einsum("nwt,nw->nt", part, weights.expand(q.shape[:2]))
    return out


def _blocks(q: Tensor, keys: Tensor) -> list[slice]:
    block = max(1, _SCORES // max(1, q.shape[1]))  # independent of N, and so is the result of a problem
    return [slice(at, at + block) for at in range(0, keys.shape[1], block)]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.tiles import load_rows

    @triton.jit(do_not_specialize=["tokens", "span"])
    def _denominators(
        queries, keys, parts, width, tokens, dim, key_stride, row_stride, scale, span,
        WB: tl.constexpr, TB: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (span of keys; head; block of queries). parts [N, spans, W, 2]: maximum and sum of exponentials, base 2.
        split, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
        w = tl.program_id(2) * WB + tl.arange(0, WB)
        q = load_rows(queries, n * width + w, dim, w < width, dim, DP, UPCAST)
        top, total = tl.full([WB], float("-inf"), tl.float32), tl.zeros([WB], tl.float32)
        for start in range(split * span, tl.minimum(tokens, (split + 1) * span), TB):
            t = start + tl.arange(0, TB)
            known = (t < tokens) & (t < (split + 1) * span)
            k = load_rows(keys + n * key_stride, t.to(tl.int64), row_stride, known, dim, DP, UPCAST)
            found = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
            found = tl.where(known[None, :], found, float("-inf"))
            new = tl.maximum(top, tl.max(found, axis=1))
            total = total * tl.exp2(top - new) + tl.sum(tl.exp2(found - new[:, None]), axis=1)
            top = new
        part = parts + ((n * tl.num_programs(0) + split) * width + w) * 2
        tl.store(part, top, mask=w < width)
        tl.store(part + 1, total, mask=w < width)

    @triton.jit(do_not_specialize=["tokens"])
    def _mass(
        queries, keys, lse, weights, out, width, tokens, dim, key_stride, row_stride, scale, weight_stride,
        WB: tl.constexpr, TB: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (block of keys; head) loops over all queries.
        n = tl.program_id(1).to(tl.int64)
        t = tl.program_id(0) * TB + tl.arange(0, TB)
        k = load_rows(keys + n * key_stride, t.to(tl.int64), row_stride, t < tokens, dim, DP, UPCAST)
        mass = tl.zeros([TB], tl.float32)
        for start in range(0, width, WB):
            w = start + tl.arange(0, WB)
            known = w < width
            q = load_rows(queries, n * width + w, dim, known, dim, DP, UPCAST)
            found = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * 1.4426950408889634)
            below = tl.load(lse + n * width + w, mask=known, other=0.0)
            weight = tl.load(weights + n * weight_stride + w, mask=known, other=0.0)
            share = tl.exp2(found - below[None, :]) * weight[None, :]
            mass += tl.sum(tl.where(known[None, :], share, 0.0), axis=1)
        tl.store(out + n * tokens + t, mass, mask=t < tokens)


def launch_log_sums(queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `log_sums_definition`. The channels of a key are contiguous."""
    heads, width, _ = queries.shape
    queries, sizes, around = _shape(queries, keys, scale)
    tokens, tile = keys.shape[1], sizes["TB"]
    span = max(tile, triton.cdiv(triton.cdiv(tokens, 32), tile) * tile)
    spans = max(1, triton.cdiv(tokens, span))
    if not tokens:
        return queries.new_full((heads, width), float("-inf"), dtype=torch.float32)
    parts = queries.new_empty((heads, spans, width, 2), dtype=torch.float32)
    _denominators[(spans, heads, triton.cdiv(width, sizes["WB"]))](queries, keys, parts, *around, span, **sizes)
    top = parts[..., 0].amax(dim=1)
    return _LN2 * (top + torch.log2((parts[..., 1] * torch.exp2(parts[..., 0] - top[:, None])).sum(dim=1)))


def launch_mass(queries: Tensor, keys: Tensor, lse: Tensor, weights: Tensor, *, scale: float) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `mass_definition`. The channels of a key are contiguous."""
    heads, width, _ = queries.shape
    queries, sizes, around = _shape(queries, keys, scale)
    weights = weights.expand(heads, width)
    assert weights.dtype == torch.float32, f"weights are {weights.dtype}"
    assert weights.stride(1) == 1 or width == 1, "a problem's weights must be contiguous"
    out = queries.new_empty((heads, keys.shape[1]), dtype=torch.float32)
    if keys.shape[1]:
        _mass[(triton.cdiv(keys.shape[1], sizes["TB"]), heads)](
            queries, keys, lse / _LN2, weights, out, *around, weights.stride(0), **sizes
        )
    return out


def _shape(queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, dict[str, Any], tuple[Any, ...]]:
    """Return contiguous queries, tiles and the arguments that both kernels take."""
    _, width, dim = queries.shape
    assert keys.stride(2) == 1, "the channels of a key must be contiguous"
    assert keys.dtype == queries.dtype, f"queries are {queries.dtype}, keys {keys.dtype}"
    padded = triton.next_power_of_2(dim)
    tile = 64 if padded * keys.dtype.itemsize <= 512 else 16
    block = max(16, min(tile, triton.next_power_of_2(width)))
    upcast = queries.device.type == "cpu" or queries.dtype == torch.float32
    sizes = {"WB": block, "TB": tile, "DP": padded, "UPCAST": upcast, "num_warps": 4}
    return queries.contiguous(), sizes, (width, keys.shape[1], dim, keys.stride(0), keys.stride(1), scale)


def launch(queries: Tensor, keys: Tensor, weights: Tensor, *, scale: float) -> Tensor:
    """Launch the Triton kernels; arguments and result as in `definition`. The channels of a key are contiguous."""
    return launch_mass(queries, keys, launch_log_sums(queries, keys, scale=scale), weights, scale=scale)


observe = by_device(launch, definition)
log_sums = by_device(launch_log_sums, log_sums_definition)
mass = by_device(launch_mass, mass_definition)
