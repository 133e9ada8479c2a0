"""Sum the exponentials of attention logits over the tokens in sink and ring, in logs, for each query head.

An index that compares the weights of rows between KV heads needs them: a head that looks at the sink needs few rows. One program
per sequence and KV head reads sink + ring keys once: 64 KB a layer for 8 heads, 32 places of 128 dimensions in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.places import held
from kvthaw.kernels.split import triton_block
from kvthaw.regions import Regions

_BLOCK = 64
"""Places that a program reads at once."""


def definition(
    query: Tensor, keys: Tensor, lengths: Tensor, starts: Tensor, centre: Tensor, *, regions: Regions, scale: float
) -> Tensor:
    """Return the log of the sum of exp(scale q.(k - centre)) over the tokens in sink and ring, [B, H, G] float32, -inf for none.

    query [B, H G, D]. keys [B, H, >= sink + ring, D]: of the slab. lengths [B] int32: with the newest token, whose key the slab
    does not have yet, so it is left out. starts [B] int32: first position of the ring. centre [B, H, D] float32.
    """
    known = held(lengths - 1, starts, regions)[:, None, None]
    near = keys[:, :, : regions.held].float() - centre[:, :, None]
    logits = query.float().unflatten(1, (keys.shape[1], -1)) @ near.mT * scale
    return torch.logsumexp(logits.masked_fill(~known, -torch.inf), dim=3)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.gpu import PRECISION

    @triton.jit
    def _mass(
        query, keys, lengths, starts, centre, out, scale, q_seq, q_head, k_seq, k_head, k_place, HEADS: tl.constexpr,
        GROUP: tl.constexpr, DIM: tl.constexpr, SINK: tl.constexpr, RING: tl.constexpr, BLOCK_G: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        # Program: one sequence and KV head.
        follow(PDL)
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // HEADS, pair % HEADS
        g, d, x = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
        is_dim = (d < DIM)[None, :]
        at = query + b * q_seq + (h * GROUP + g)[:, None] * q_head + d[None, :]
        q = tl.load(at, mask=(g < GROUP)[:, None] & is_dim, other=0.0).to(tl.float32)
        middle = tl.load(centre + pair * DIM + d, mask=d < DIM, other=0.0)
        length, start = tl.load(lengths + b) - 1, tl.load(starts + b)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        for begin in range(0, SINK + RING, BLOCK):
            place = begin + x
            age = (place - start + RING * (start // RING + 1)) % RING  # of a sum that is not negative
            known = tl.where(place < SINK, place < length, age < length - start) & (place < SINK + RING)
            where = keys + b * k_seq + h * k_head + place[:, None] * k_place + d[None, :]
            k = tl.load(where, mask=known[:, None] & is_dim, other=0.0).to(tl.float32) - middle[None, :]
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            score = tl.where(known[None, :], score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(score - shift[:, None]), 1)
            top = new
        lse = tl.where(total > 0, tl.where(total > 0, top, 0.0) + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(out + pair * GROUP + g, lse, mask=g < GROUP)


def launch(
    query: Tensor, keys: Tensor, lengths: Tensor, starts: Tensor, centre: Tensor, *, regions: Regions, scale: float
) -> Tensor:
    """Launch the Triton kernel; arguments and results as in `definition`."""
    (batch, heads, _, dim), group = keys.shape, query.shape[1] // keys.shape[1]
    assert query.stride(2) == keys.stride(3) == lengths.stride(0) == starts.stride(0) == 1 and centre.is_contiguous()
    out = torch.empty((batch, heads, group), dtype=torch.float32, device=query.device)
    _mass[(batch * heads,)](
        query, keys, lengths, starts, centre, out, scale, *query.stride()[:2], *keys.stride()[:3], HEADS=heads, GROUP=group,
        DIM=dim, SINK=regions.sink, RING=regions.ring, BLOCK_G=triton_block(group, 16), BLOCK_D=triton_block(dim, 16),
        BLOCK=_BLOCK, num_warps=4, **dependent(query.device),
    )  # fmt: skip
    return out


held_mass = by_device(launch, definition)
