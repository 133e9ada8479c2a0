"""Rotate queries and keys by their positions, both in one launch.

transformers computes this with ten launches, which move 100 kB a token of 32 query and 8 key heads of 128 dimensions in bfloat16.
The kernel moves 21. For 16,384 tokens that is 0.34 GB and 80 us at 4.3 TB/s, for 0.38 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gpu import by_device

_ROWS = 16  # tokens of a program


def definition(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return x cos + (-x2, x1) sin for both tensors x, whose last dimension has the halves x1 and x2.

    Each product and each sum is rounded to the dtype.

    query: [B, Hq, T, D].
    key: [B, H, T, D].
    cos: the cosines of the angles, [B, T, D].
    sin: their sines, [B, T, D].
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    return turned(query), turned(key)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _turn(out, x, at, cos_low, cos_high, sin_low, sin_high, half, inside):
        # Products and sums are rounded as separate operations round them.
        kind = out.dtype.element_ty
        low = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
        a, b = (low * cos_low).to(kind).to(tl.float32), (-high * sin_low).to(kind).to(tl.float32)
        tl.store(out + at, (a + b).to(kind), mask=inside)
        a, b = (high * cos_high).to(kind).to(tl.float32), (low * sin_high).to(kind).to(tl.float32)
        tl.store(out + at + half, (a + b).to(kind), mask=inside)

    @triton.jit(do_not_specialize=["steps"])
    def _rotate(out_q, out_k, query, key, cos, sin, q_heads, steps, half, q_b, q_h, q_t, k_b, k_h, k_t, c_b, s_b,
                ROWS: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program (block of tokens, head of the queries or else of the keys, sequence). Outputs have the strides of inputs.
        follow(PDL)
        t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
        x, far = tl.arange(0, HP)[None, :], t.to(tl.int64)[:, None]
        inside = (t < steps)[:, None] & (x < half)
        angle = far * (2 * half) + x
        cos_low = tl.load(cos + batch * c_b + angle, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + batch * c_b + angle + half, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + batch * s_b + angle, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + batch * s_b + angle + half, mask=inside, other=0.0).to(tl.float32)
        if head < q_heads:
            at = batch * q_b + head.to(tl.int64) * q_h + far * q_t + x
            _turn(out_q, query, at, cos_low, cos_high, sin_low, sin_high, half, inside)
        else:
            at = batch * k_b + (head - q_heads).to(tl.int64) * k_h + far * k_t + x
            _turn(out_k, key, at, cos_low, cos_high, sin_low, sin_high, half, inside)


def serves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel can take such arguments: one dtype, angles for every dimension, dense tensors."""
    batch, _, steps, dim = query.shape
    same = query.dtype == key.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
    angles = cos.ndim == 3 and cos.shape[0] in (1, batch) and cos.shape[1:] == (steps, dim) and dim % 2 == 0
    dense = all(x.stride(3) == 1 and (x.is_contiguous() or x.transpose(1, 2).is_contiguous()) for x in (query, key))
    return same and angles and dense and cos[0].is_contiguous() and sin[0].is_contiguous()


def launch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and results as in `definition`, where `serves` agrees. Angles may be of one row."""
    assert serves(query, key, cos, sin)
    batch, heads, steps, dim = query.shape
    out = torch.empty_like(query), torch.empty_like(key)  # which keep strides of dense tensors
    assert out[0].stride() == query.stride() and out[1].stride() == key.stride()
    turns = [x.stride(0) if x.shape[0] > 1 else 0 for x in (cos, sin)]
    if query.numel():
        _rotate[(triton.cdiv(steps, _ROWS), heads + key.shape[1], batch)](
            *out, query, key, cos, sin, heads, steps, dim // 2, *query.stride()[:3], *key.stride()[:3], *turns,
            ROWS=_ROWS, HP=triton.next_power_of_2(dim // 2), **dependent(query.device),
        )  # fmt: skip
    return out


rotate = by_device(launch, definition)
