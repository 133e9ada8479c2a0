"""Assign each key to its nearest promoted key, in the space that IceCache searches (equation 2).

2 N T C D operations (8 heads of 128k keys, C = 6,554, D = 128: 1.8 T, 2.2 ms at 795 TFLOP/s). T D elements are read per
problem; each block of keys reads the promoted keys from caches; the [T, C] products stay in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device

ROOM = 1.25
"""c^2 over the largest |k|^2. At 1 the last bit of the largest norm would decide parents: keys of a repeated token have equal
norms, and the slope of lift(k) is infinite there."""
_SCORES = 1 << 24  # float32 products that the definition holds at once


def lifted(keys: Tensor) -> Tensor:
    """Compute lift(k) = sqrt(c^2 - |k|^2) of keys [N, T, D], c^2 = ROOM max |k|^2 of a problem: [N, T] float32."""
    square = torch.linalg.vector_norm(keys.float(), dim=2).square()
    lift: Tensor = (ROOM * square.amax(dim=1, keepdim=True) - square).sqrt()
    return lift


def definition(keys: Tensor, promoted: Tensor) -> Tensor:
    """Return the index of the nearest promoted key of each key, [N, T] int64; ties go to the first.

    keys [N, T, D]; promoted [N, C] int64: positions of the promoted keys. Under T_K(k) = [k/c, sqrt(1 - |k|^2/c^2)] two keys a,
    b are nearer the larger a.b + lift(a) lift(b) is.
    """
    problems, tokens, dim = keys.shape
    lift = lifted(keys)
    to = keys.gather(1, promoted[:, :, None].expand(-1, -1, dim)).float().transpose(1, 2)
    up = lift.gather(1, promoted)[:, None]
    labels = torch.empty((problems, tokens), dtype=torch.int64, device=keys.device)
    block = max(1, _SCORES // (problems * promoted.shape[1]))
    for at in range(0, tokens, block):
        near = torch.baddbmm(lift[:, at : at + block, None] * up, keys[:, at : at + block].float(), to)
        labels[:, at : at + block] = near.argmax(dim=2)
    return labels


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.tiles import load_rows

    @triton.jit(do_not_specialize=["tokens", "count"])
    def _nearest(keys, lift, promoted, up, labels, tokens, count, dim,
                 BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
        # Program (block of keys; problem) loops over all promoted keys.
        n = tl.program_id(1).to(tl.int64)
        t, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
        known = t < tokens
        k = load_rows(keys, n * tokens + t, dim, known, dim, DP, UPCAST)
        own = tl.load(lift + n * tokens + t, mask=known, other=0.0)
        best, label = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.int32)
        for start in range(0, count, BN):
            c = start + i
            there = c < count
            p = load_rows(promoted, n * count + c, dim, there, dim, DP, UPCAST)
            near = tl.dot(k, tl.trans(p), input_precision=PRECISION)
            near += own[:, None] * tl.load(up + n * count + c, mask=there, other=0.0)[None, :]
            near = tl.where(there[None, :], near, float("-inf"))
            top = tl.max(near, axis=1)
            label = tl.where(top > best, start + tl.argmax(near, axis=1), label)
            best = tl.maximum(best, top)
        tl.store(labels + n * tokens + t, label.to(tl.int64), mask=known)


def launch(keys: Tensor, promoted: Tensor) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `definition`."""
    keys = keys.contiguous()
    problems, tokens, dim = keys.shape
    lift = lifted(keys)
    to = keys.gather(1, promoted[:, :, None].expand(-1, -1, dim))
    labels = torch.empty((problems, tokens), dtype=torch.int64, device=keys.device)
    padded = max(16, triton.next_power_of_2(dim))
    row = padded * keys.dtype.itemsize
    tall, broad = (128, 64) if row <= 256 else (64, 64) if row <= 512 else (64, 16)
    _nearest[(triton.cdiv(tokens, tall), problems)](
        keys, lift, to, lift.gather(1, promoted), labels, tokens, promoted.shape[1], dim, BM=tall, BN=broad, DP=padded,
        UPCAST=keys.device.type == "cpu" or keys.dtype == torch.float32, num_warps=8,
    )  # fmt: skip
    return labels


nearest = by_device(launch, definition)
