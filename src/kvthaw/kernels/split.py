"""How the keys of a decode step are split among programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Split:
    """How keys are split: `splits` programs per sequence and KV head, each over blocks of `block` keys, with `stages` blocks
    loaded ahead."""

    block: int
    splits: int
    warps: int
    stages: int


def split_for(pairs: int, n: int, dim: int, itemsize: int, multiprocessors: int) -> Split:
    """Choose the split for `pairs` (sequence, KV head) pairs of n keys each.

    A step reads pairs * n * 2 * dim * itemsize bytes once: 4 MiB for 8 heads of 1k keys of 128 in bf16, 1 us at 4.3 TB/s; 512
    MiB for 128k, 125 us. The small case is bound by latency, so all loads should be in flight at once: blocks shrink until
    there are about 100 programs of one block each, which need no pipelining (2 us less per step than three stages). Such a
    program issues all its loads before it waits for any, and so does the merge (10.9 -> 8.4 us for 1k keys). The large case is
    bound by memory bandwidth: a block is 32 KiB of K and V, with three stages in shared memory and two programs per
    multiprocessor in a single wave. A split writes and reads 4 * dim bytes per query head: 0.5 MiB for 33 splits of 32 heads,
    which stay in the L2 cache.
    """
    row = 2 * triton_block(dim) * itemsize
    block = min(128, max(16, 32768 // row))
    while block > 16 and pairs * -(-n // block) < 100:
        block //= 2
    splits = max(1, min(2 * multiprocessors // pairs, -(-n // block)))
    return Split(block, splits, warps=2 if block * dim * itemsize <= 4096 else 4, stages=1 if splits * block >= n else 3)


def triton_block(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and at least `least`."""
    return 1 << (max(size, least) - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; under the interpreter those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
