"""Processes of a split model that torchrun starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from kvthaw.engine.processes import member
from kvthaw.errors import ConfigError


@contextmanager
def processes(size: int) -> Iterator[int]:
    """Join the `size` processes that torchrun started, each with its own GPU if there are GPUs. Yields this process's rank.

    Raises ConfigError unless torchrun started this number of processes.
    """
    if size == 1:
        yield 0
        return
    if not dist.is_torchelastic_launched():
        raise ConfigError(f"tp is {size}; start {size} processes: torchrun --nproc-per-node {size} -m lab ...")
    with member(dist.get_node_local_rank()):
        if dist.get_world_size() != size:
            raise ConfigError(f"tp is {size}; torchrun started {dist.get_world_size()} processes")
        yield dist.get_rank()
