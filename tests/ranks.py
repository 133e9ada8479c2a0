"""A program of several processes, each with its heads of a model, as torchrun starts them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 120.0
"""Seconds after which processes count as hanging."""


def run(size: int, work: Callable[[int], Any], meeting: Path) -> list[Any]:
    """Return what work(rank) returns in each of so many forked processes of one group; raises what one raises. meeting: a file that
    is not there."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(its, rank, size, work, meeting), daemon=True)
        process.start()
        its.close()
        pipes.append(mine)
        processes.append(process)
    found = []
    try:
        for pipe in pipes:
            assert pipe.poll(PATIENCE), "a process hangs"
            answer = pipe.recv()
            if isinstance(answer, Failed):
                raise AssertionError(answer.trace)
            found.append(answer)
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, "a process does not end"
    finally:
        for process in processes:
            process.kill()
    return found


class Failed:
    """What a process raised, as text."""

    def __init__(self, trace: str) -> None:
        self.trace = trace


def _run(pipe: Connection, rank: int, size: int, work: Callable[[int], Any], meeting: Path) -> None:
    try:
        with joined(rank, size, meeting):
            pipe.send(work(rank))
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        os._exit(1)


@contextmanager
def joined(rank: int, size: int, meeting: Path) -> Iterator[None]:
    """Be a process of a group within it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    yield
    dist.destroy_process_group()
