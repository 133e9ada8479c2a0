"""Causal attention of several prompts, one after the other in one row, each to itself alone, in one launch.

Eight prompts of 1,024 tokens take 69 GFLOP (32 query heads of 128 dimensions), 243 us on an H200; torch's kernel takes 327. Two
of 4,094 tokens take 695 us, with torch's 901. The package flash-attn-4 multiplies masked weights of 0 with values of the next
prompt, so a NaN would pass on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.split import shared_memory, stages_for, triton_block

_TILE = 64
"""Queries of a program. With tiles of 128, 8 prompts of 1,024 tokens take 261 us on an H200, and 243 with these."""


def serves(query: Tensor) -> bool:
    """Return whether the kernel can take queries [1, Hq, T, D]: 16 bits on a GPU, at most 256 dimensions."""
    return HAS_TRITON and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] <= 256


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.split import LOG2E

    @triton.jit
    def _attend_run(
        q, acc, top, sums, keys, values, begin, end, row, n, k_row, v_row, scale, softcap, DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LAST: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Attend to keys begin .. end, whole blocks of them. LAST: the run ends with the prompt or the queries' own keys; rows
        # of the next prompt are not read.
        d, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        for at in range(begin, end, BLOCK_N):
            place = at + offset
            at_keys = keys + place.to(tl.int64)[:, None] * k_row + d[None, :]
            at_values = values + place.to(tl.int64)[:, None] * v_row + d[None, :]
            if LAST:
                both = (place < n)[:, None] & (d < DIM)[None, :]
                k, v = tl.load(at_keys, mask=both, other=0.0), tl.load(at_values, mask=both, other=0.0)
            elif DIM == BLOCK_D:
                k, v = tl.load(at_keys), tl.load(at_values)
            else:
                inside = (d < DIM)[None, :]
                k, v = tl.load(at_keys, mask=inside, other=0.0), tl.load(at_values, mask=inside, other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if softcap is not None:
                score = score * (scale / softcap)
                score = (2.0 * tl.sigmoid(2.0 * score) - 1.0) * (softcap * LOG2E)
            else:
                score = score * (scale * LOG2E)
            if LAST:
                score = tl.where(place[None, :] <= row[:, None], score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            weight, decay = tl.exp2(score - new[:, None]), tl.exp2(top - new)
            sums = sums * decay + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
            top = new
        return acc, top, sums

    @triton.jit(do_not_specialize=["prompts"])
    def _packed(
        out, query, keys, values, ends, sinks, prompts, q_head, q_row, k_head, k_row, v_head, v_row, o_head, o_row, scale, softcap,
        GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        PROMPTS: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (tile of queries, query head). A prompt has whole tiles; its last, which has the most keys, begins first.
        tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        i = tl.arange(0, PROMPTS)
        firsts = tl.load(ends + i, mask=i < prompts, other=0)
        tokens = tl.load(ends + i + 1, mask=i < prompts, other=0) - firsts
        tiles = (tokens + BLOCK_M - 1) // BLOCK_M
        upto = tl.cumsum(tiles, 0)
        mine = (tile < upto) & (tile >= upto - tiles)
        first, n = tl.sum(tl.where(mine, firsts, 0), 0).to(tl.int64), tl.sum(tl.where(mine, tokens, 0), 0)
        begin = tl.sum(tl.where(mine, upto - 1 - tile, 0), 0) * BLOCK_M

        d, row = tl.arange(0, BLOCK_D), begin + tl.arange(0, BLOCK_M)
        held = (row < n)[:, None] & (d < DIM)[None, :]
        q = tl.load(query + head * q_head + (first + row)[:, None] * q_row + d[None, :], mask=held, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        keys += head // GROUP * k_head + first * k_row
        values += head // GROUP * v_head + first * v_row
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if sinks is not None:
            top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
            sums += 1.0
        acc, top, sums = _attend_run(
            q, acc, top, sums, keys, values, 0, begin, row, n, k_row, v_row, scale, softcap, DIM, BLOCK_D, BLOCK_N, False, UPCAST,
        )  # fmt: skip
        end = tl.minimum(begin + BLOCK_M, n)
        acc, top, sums = _attend_run(
            q, acc, top, sums, keys, values, begin, end, row, n, k_row, v_row, scale, softcap, DIM, BLOCK_D, BLOCK_N, True, UPCAST,
        )  # fmt: skip
        to = out + head * o_head + (first + row)[:, None] * o_row + d[None, :]
        tl.store(to, (acc / sums[:, None]).to(out.dtype.element_ty), mask=held)


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    ends: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch the Triton kernel; see `kvthaw.kernels.dense.packed_attention`. The output has its heads within tokens."""
    (_, q_heads, total, dim), heads = query.shape, keys.shape[1]
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "the last dimension is contiguous"
    assert len(query) == len(keys) == len(values) == 1 and keys.shape == values.shape == (1, heads, total, dim)
    assert sum(lengths) == total and ends.shape == (len(lengths) + 1,) and ends.dtype == torch.int32 and ends.is_contiguous()
    out = query.new_empty((1, total, q_heads, dim)).transpose(1, 2)
    tiles, block_d = sum(-(-length // _TILE) for length in lengths), triton_block(dim, 16)
    block_n = 64 if block_d <= 128 else 32
    interpreted = query.device.type == "cpu"
    if interpreted and sinks is not None:  # the interpreter supports no bfloat16 scalars
        sinks = sinks.float()
    bytes_of_stage = 2 * block_n * block_d * query.element_size()
    _packed[(tiles, q_heads)](
        out, query, keys, values, ends, sinks, len(lengths), *query.stride()[1:3], *keys.stride()[1:3], *values.stride()[1:3],
        *out.stride()[1:3], scale, softcap, GROUP=q_heads // heads, DIM=dim, BLOCK_D=block_d, BLOCK_M=_TILE, BLOCK_N=block_n,
        PROMPTS=triton_block(len(lengths), 64), UPCAST=interpreted, num_warps=4,
        num_stages=stages_for(3, bytes_of_stage, shared_memory(query.device)),
    )  # fmt: skip
    return out
