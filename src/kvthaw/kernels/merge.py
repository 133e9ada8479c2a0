"""Merge attention over disjoint sets of keys by their log-sum-exp.

`merge_into` adds one part to a running result in place. Per query and head it moves 8 D bytes of the result and D elements of
the part: 640 MB for 16k queries of 32 heads, D = 128, bf16, 0.15 ms at 4.3 TB/s, compared with 6.7 ms of attention to 16k keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some of the keys, ready to be merged with the rest.

    out: [B, Hq, D] float32; 0, never NaN, where lse is -inf.
    lse: [B, Hq] float32, natural log of the sum of exponentials. gpt-oss sinks are ``Partial(0, s_aux)``.
    """

    out: Tensor
    lse: Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint key sets. outs: [..., D]; lses: [...], natural log; any float dtype.

    Returns (out [..., D], lse [...]) in float32: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i. A part with
    lse -inf contributes nothing; if all are -inf, out is 0 and lse is -inf.
    """
    lse = torch.stack([part.float() for part in lses])
    most = lse.amax(dim=0)
    weight = torch.exp(lse - torch.where(most == -torch.inf, 0.0, most))  # shifted by the maximum: accurate for any lse
    total = weight.sum(dim=0)
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, w in zip(outs, weight / total.clamp(min=1.0), strict=True):
        out = out + torch.where(w[..., None] > 0, part.float(), 0.0) * w[..., None]
    return out, most + torch.log(total)


def definition(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge part [B, H, T, D], any float dtype, with part_lse [B, H, T] into out [B, H, T, D] and lse [B, H, T], float32, in
    place. Parts with lse -inf are treated as in `merge`."""
    merged, total = merge((out, part), (lse, part_lse))
    out.copy_(merged)
    lse.copy_(total)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _merge_into(out, lse, part, part_lse, heads, steps, dim, part_b, part_h, part_t, ROWS: tl.constexpr, DP: tl.constexpr):
        # Program (block of queries; sequence and head). Only `part` may be strided.
        t, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
        d = tl.arange(0, DP)
        known = t < steps
        inside = known[:, None] & (d < dim)[None, :]
        at = pair * steps + t
        own = tl.load(lse + at, mask=known, other=float("-inf"))
        new = tl.load(part_lse + at, mask=known, other=float("-inf"))
        most = tl.maximum(own, new)
        base = tl.where(most == float("-inf"), 0.0, most)
        a, b = tl.exp(own - base), tl.exp(new - base)
        total = tl.maximum(a + b, 1.0)  # at least exp(0), or 0 if both lse are -inf
        where = out + at[:, None] * dim + d[None, :]
        source = part + (pair // heads) * part_b + (pair % heads) * part_h + t.to(tl.int64)[:, None] * part_t + d[None, :]
        old = tl.load(where, mask=inside & (a > 0.0)[:, None], other=0.0)
        add = tl.load(source, mask=inside & (b > 0.0)[:, None], other=0.0).to(tl.float32)
        tl.store(where, old * (a / total)[:, None] + add * (b / total)[:, None], mask=inside)
        tl.store(lse + at, most + tl.log(total), mask=known)


def launch(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Launch the Triton kernel; arguments as in `definition`. out and lse are contiguous, as is part's last dimension."""
    (batch, heads, steps, dim), part_lse = out.shape, part_lse.contiguous()
    assert out.is_contiguous() and lse.is_contiguous() and part.stride(3) == 1
    assert out.dtype == lse.dtype == part_lse.dtype == torch.float32
    assert part.shape == out.shape and lse.shape == part_lse.shape == out.shape[:3]
    rows = 16
    _merge_into[(triton.cdiv(steps, rows), batch * heads)](
        out, lse, part, part_lse, heads, steps, dim, *part.stride()[:3], ROWS=rows, DP=triton.next_power_of_2(dim)
    )


merge_into = by_device(launch, definition)
