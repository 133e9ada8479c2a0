"""How the keys of a decode step are split among programs, and how the last of them to finish merges what all found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kvthaw.kernels import HAS_TRITON

_BESIDE = 24 << 10
"""Bytes of shared memory for what is not pipelined; 5 to 34 KB were compiled for sm_89."""


@dataclass(frozen=True, slots=True)
class Split:
    """How keys are split: `splits` programs per sequence and KV head, each over blocks of `block` keys, with `stages` blocks
    loaded ahead.

    each: tokens for which a sequence uses one program, rounded to the nearest number of programs, at least 1; 0: every sequence
        uses all programs.
    """

    block: int
    splits: int
    warps: int
    stages: int
    each: int = 0


def split_for(
    pairs: int, n: int, dim: int, itemsize: int, multiprocessors: int, scattered: bool = False, whole: bool = False
) -> Split:
    """Choose the split for `pairs` (sequence, KV head) pairs of n keys each.

    scattered: a table gives the addresses of many keys.
    whole: these are all keys of blocks, one after the other, in the dtype of the slab.

    A step reads pairs * n * 2 * dim * itemsize bytes once: 4 MiB for 8 heads of 1k keys of 128 in bf16, 1 us at 4.3 TB/s;
    512 MiB for 128k, 125 us. The small case is bound by latency, so all loads should be in flight at once. Blocks shrink
    until there are about 100 programs of one block each. These need no pipelining, which saves 2 us per step against three
    stages. Such a program issues all its loads before it waits for any, and so does the merge (10.9 -> 8.4 us for 1k keys).
    The large case is bound by memory bandwidth: a block is 32 KiB of K and V, with three stages in shared memory and two
    programs per multiprocessor in a single wave. A split writes and reads 4 * dim bytes per query head: 0.5 MiB for 33
    splits of 32 heads, which stay in the L2 cache. Programs that read scattered rows use few registers and no shared memory
    for stages. Four of them share a multiprocessor and wait for each other's rows. They get two waves, of two blocks at
    least. Rows of whole blocks are read best by many programs of two warps that load 32 KiB ahead, 4.0 TB/s on an H200: 256
    sequences of 1,100 tokens take 284 us instead of 347 with 64 KiB in the registers of four warps. A sequence has one program
    for every 256 tokens of few sequences, and for every 1,024 of many; its other programs end at once, for one of many sequences
    may be much longer than the others. 100 requests of a trace take 113 us instead of 160, 30 of them 45 instead of 75.
    """
    row = 2 * triton_block(dim) * itemsize
    block = min(128, max(16, 32768 // row))
    while block > 16 and pairs * -(-n // block) < 100:
        block //= 2
    splits = max(1, min(2 * multiprocessors // pairs, -(-n // block)))
    if whole and itemsize <= 2 and splits * block < n:
        each = 256 if pairs < 128 else 512 if pairs < 512 else 1024
        most = max(1, min((n + each // 2) // each, max(8, 4 * multiprocessors // pairs)))
        if pairs * most >= multiprocessors:
            return Split(min(64, max(16, 32768 // row)), most, warps=2, stages=2, each=each)
    if scattered and splits * block < n:
        block = min(64, max(16, 16384 // row))
        return Split(block, max(1, min(-(-8 * multiprocessors // pairs), n // (2 * block))), warps=4, stages=1)
    return Split(block, splits, warps=2 if block * dim * itemsize <= 4096 else 4, stages=1 if splits * block >= n else 3)


def stages_for(stages: int, tile: int, shared: int) -> int:
    """Return how many pipeline stages of a block of `tile` bytes fit in shared memory, at most `stages`.

    Shared memory holds all stages but one, and the operands of products and of the merge.
    """
    return max(1, min(stages, 1 + (shared - _BESIDE) // tile))


def triton_block(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and at least `least`."""
    return 1 << (max(size, least) - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; under the interpreter, the number of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a GPU: 99 KiB on most for workstations, 227 on an H200, also
    under the interpreter."""
    if device.type != "cuda":
        return 227 << 10
    most: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return most


if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.runtime import driver

    LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def own_range(first, last, split, splits, BLOCK_N: tl.constexpr):
        # Return the range of a split: whole blocks, except the last.
        run = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK_N) * BLOCK_N
        return first + split * run, tl.minimum(first + (split + 1) * run, last)

    @triton.jit
    def _found(acc_parts, which, valid, d, is_dim, DIM: tl.constexpr):
        # Load the outputs [., ., DIM] of the splits and heads in `which`. The result is undefined for splits without visible
        # keys.
        at = acc_parts + which[:, :, None] * DIM + d[None, None, :]
        return tl.load(at, mask=valid[:, :, None] & is_dim[None, None, :], other=0.0, cache_modifier=".cg")

    @triton.jit
    def _mix(share, piece):
        return tl.sum(share[:, :, None] * tl.where(share[:, :, None] > 0, piece, 0.0), 0)

    @triton.jit
    def merge_splits(
        acc_parts, lse_parts, sinks, more_out, more_lse, out, before, first, splits, used, GROUP: tl.constexpr, DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, MERGE_G: tl.constexpr, MERGE_S: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        # Merge what the first `used` splits of a KV head found, with sinks and another partial if given, and store the output.
        # before: query heads of earlier sequences; first: of the KV head.
        mg, s, c, d = tl.arange(0, MERGE_G), tl.arange(0, MERGE_S), tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
        is_mine, is_dim = mg < GROUP, d < DIM
        head = first + mg
        rows = before + head
        if CHUNK >= MERGE_S:  # issued before any wait
            piece = _found(
                acc_parts, rows[None, :] * splits + s[:, None], (s < used)[:, None] & is_mine[None, :], d, is_dim, DIM
            )
        every = tl.load(
            lse_parts + rows[None, :] * splits + s[:, None],
            mask=is_mine[None, :] & (s < used)[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        peak = tl.max(every, 0)
        if sinks is not None:
            sunk = tl.load(sinks + head, mask=is_mine, other=0.0).to(tl.float32) * LOG2E
            peak = tl.maximum(peak, sunk)
        if more_lse is not None:
            more = tl.load(more_lse + rows, mask=is_mine, other=float("-inf")) * LOG2E
            peak = tl.maximum(peak, more)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        share_of = tl.exp2(every - peak[None, :])
        whole = tl.sum(share_of, 0)
        mixed = tl.zeros((MERGE_G, BLOCK_D), tl.float32)
        if sinks is not None:
            whole += tl.exp2(sunk - peak)
        if more_lse is not None:
            share = tl.exp2(more - peak)
            whole += share
            given = (share > 0)[:, None] & is_dim[None, :]
            mixed += share[:, None] * tl.load(more_out + rows[:, None] * DIM + d[None, :], mask=given, other=0.0)
        if CHUNK >= MERGE_S:
            mixed += _mix(share_of, piece)
        else:
            for at in range(0, used, CHUNK):
                which = rows[None, :] * splits + (at + c)[:, None]
                valid = is_mine[None, :] & (at + c < used)[:, None]
                piece = _found(acc_parts, which, valid, d, is_dim, DIM)
                part_lse = tl.load(lse_parts + which, mask=valid, other=float("-inf"), cache_modifier=".cg")
                mixed += _mix(tl.exp2(part_lse - peak[None, :]), piece)
        by = tl.where(whole > 0, whole, 1.0)
        tl.store(out + rows[:, None] * DIM + d[None, :], mixed / by[:, None], mask=is_mine[:, None] & is_dim[None, :])
