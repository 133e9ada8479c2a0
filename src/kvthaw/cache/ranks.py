"""Tensor parallelism: the processes that a model's heads are split over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that a model is split over, and this process's rank; one process by default.

    All processes run the same program on the same tokens, so that they take the same decisions without communication.
    least() agrees on values that depend on a process's own memory. gather() collects values of all heads of a layer. All
    processes must call both in the same order. A graph can capture gather(); least() waits for the device.

    rank, size: the number of this process, and the number of processes.
    group: their process group.
    device: this process's device.
    splits_heads: each process has its own KV heads, in the order of the ranks. False: each has all of them.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    splits_heads: bool = False

    def heads(self, count: int) -> range:
        """Return the numbers, among the model's KV heads, of this process's `count` heads of a layer."""
        first = self.rank * count if self.splits_heads else 0
        return range(first, first + count)

    def all_heads(self, count: int) -> int:
        """Return the number of heads of a layer in all processes, if this process has `count`."""
        return count * self.size if self.splits_heads else count

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of all processes along a dimension that counts heads."""
        if not self.splits_heads:
            return own
        every = own.new_empty((self.size, *own.shape))
        dist.all_gather(list(every), own.contiguous(), group=self.group)
        return every.movedim(0, dim).flatten(dim, dim + 1)

    def least(self, own: int) -> int:
        """Return the smallest value of all processes."""
        if self.size == 1:
            return own
        least = torch.tensor(int(own), device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return self


ALONE = Ranks()
"""A model in a single process."""
