"""Coverage of keys by chosen keys: the largest cosine between each key and any of them, for the start of k-means.

One pass over keys and centres, as in the assignment step of k-means (2 N T C D operations), writes one number per key. New
centres can only raise the coverage found so far. Several rounds of new centres therefore cost together as much as one round
with all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.kmeans import SCORES, tiling


def definition(covered: Tensor, keys: Tensor, centres: Tensor) -> None:
    """Update covered[n, t] to the maximum of itself and cos(keys[n, t], keys[n, c]) over all c in centres[n], in place, in
    blocks of keys.

    A zero key has no direction to miss: its coverage is 1, and as a centre its cosine is 0. covered [N, T] float32; keys [N, T,
    D]; centres [N, C] int64, C >= 1.
    """
    m = _directions(keys, centres, torch.float32).transpose(1, 2)
    block = max(1, SCORES // max(1, centres.numel()))
    for at in range(0, keys.shape[1], block):
        part = keys[:, at : at + block].float()
        length = part.norm(dim=2)
        nearest = torch.where(length > 0, (part @ m).amax(dim=2) / length, 1.0)
        covered[:, at : at + block] = torch.maximum(covered[:, at : at + block], nearest)


def _directions(keys: Tensor, which: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the keys [N, T, D] at which [N, C] int64, normalised to length 1, or 0 where a key is 0: [N, C, D]."""
    taken = keys.gather(1, which[:, :, None].expand(-1, -1, keys.shape[2])).float()
    return torch.nn.functional.normalize(taken, dim=2).to(dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.tiles import load_rows

    @triton.jit(do_not_specialize=["tokens", "count"])
    def _direct(keys, which, units, tokens, count, dim, DP: tl.constexpr):
        # Program (chosen key; problem).
        n, c, d = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, DP)
        row = n * tokens + tl.load(which + n * count + c)
        k = tl.load(keys + row * dim + d, mask=d < dim, other=0.0).to(tl.float32)
        square = tl.sum(k * k, axis=0)
        unit = k / tl.sqrt(tl.where(square > 0.0, square, 1.0))
        tl.store(units + (n * count + c) * dim + d, unit.to(units.dtype.element_ty), mask=d < dim)

    @triton.jit(do_not_specialize=["tokens", "count"])
    def _cover(
        keys, centres, covered, tokens, count, dim,
        BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (block of keys; problem) loops over all centres.
        n = tl.program_id(1).to(tl.int64)
        t, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
        known = t < tokens
        k = load_rows(keys, n * tokens + t, dim, known, dim, DP, UPCAST)
        square = tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        best = tl.full([BM, BN], float("-inf"), tl.float32)
        for start in range(0, count, BN):
            c = start + i
            m = load_rows(centres, n * count + c, dim, c < count, dim, DP, UPCAST)
            found = tl.dot(k, tl.trans(m), input_precision=PRECISION)
            if start + BN > count:
                found = tl.where((c < count)[None, :], found, float("-inf"))
            best = tl.maximum(best, found)
        nearest = tl.where(square > 0.0, tl.max(best, axis=1) / tl.sqrt(tl.where(square > 0.0, square, 1.0)), 1.0)
        place = covered + n * tokens + t
        tl.store(place, tl.maximum(tl.load(place, mask=known, other=0.0), nearest), mask=known)


def launch_directions(keys: Tensor, which: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `_directions`."""
    keys, which = keys.contiguous(), which.contiguous()
    problems, tokens, dim = keys.shape
    units = torch.empty((*which.shape, dim), dtype=dtype, device=keys.device)
    _direct[(which.shape[1], problems)](
        keys, which, units, tokens, which.shape[1], dim, DP=triton.next_power_of_2(dim), num_warps=1
    )
    return units


def launch(covered: Tensor, keys: Tensor, centres: Tensor) -> None:
    """Launch the Triton kernel; arguments as in `definition`. With 16-bit keys the centres are compared in 16 bits too."""
    assert covered.is_contiguous()
    assert covered.dtype == torch.float32
    keys = keys.contiguous()
    problems, tokens, dim = keys.shape
    shape = tiling(dim, keys.dtype, keys.device)
    _cover[(triton.cdiv(tokens, shape["BM"]), problems)](
        keys, launch_directions(keys, centres, keys.dtype), covered, tokens, centres.shape[1], dim, **shape
    )


cover = by_device(launch, definition)
directions = by_device(launch_directions, _directions)
