"""Decode steps of a model that is split over GPUs, with drawn keys and values: torchrun --nproc-per-node 2 -m lab.split.

Every process builds its part of the weights and draws the keys and values of its heads. A record for each setting, as of
`kvthaw bench decode`, bytes of one process; a line with an error for one that fails, such as for memory. With --sums FILE first
what an all-reduce takes, us each of 64 in one CUDA graph: nccl, and direct, by writing to each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvthaw.cache.ranks import Ranks
from kvthaw.engine.hf.tensor_parallel import AllReduce
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import ResultsFile, noted
from lab.bench.settings import ShapeSetting, grid
from lab.filled import FilledBench
from lab.script import Report, options, printing, run_as_script
from lab.torchrun import processes

_SUMS, _ROUNDS = 64, 20


class SplitBench(FilledBench):
    """A FilledBench whose failures are lines of the report."""

    report: Report

    def failed(self, one: ShapeSetting, error: Exception) -> None:
        self.report.record(one.to_dict(), {"error": f"{type(error).__name__}: {str(error)[:200]}"})


def sums(device: torch.device, size: int) -> Iterator[dict[str, Any]]:
    """Yield what all-reduces of bfloat16 take by each way, with their largest error of 1,000 random numbers."""
    group, rank = dist.group.WORLD, dist.get_rank()
    direct = AllReduce(Ranks(rank, size, group, device), torch.bfloat16)
    ways: dict[str, Callable[[Tensor], Any]] = {"nccl": partial(dist.all_reduce, group=group)}
    if direct.inbox is not None:
        ways["direct"] = direct
    for rows, width in ((1, 4096), (1, 8192), (4, 8192), (8, 8192)):
        for way, add in ways.items():
            x = torch.randn(rows, width, device=device).bfloat16()
            exact = x.float()
            dist.all_reduce(exact, group=group)
            found = x.clone()
            out = add(found)
            error = float(((found if out is None else out).float() - exact).abs().max())
            x.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_SUMS):
                    add(x)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            dist.barrier()
            begin.record()
            for _ in range(_ROUNDS):
                graph.replay()
            end.record()
            end.synchronize()
            us = 1e3 * begin.elapsed_time(end) / (_SUMS * _ROUNDS)
            yield {"bench": "all_reduce", "processes": size, "way": way, "bytes": x.nbytes, "us": round(us, 2), "error": error}
            del graph


def main() -> None:
    """Time the sums, then each setting."""
    given = options(
        __doc__, tp=2, shape="llama-3.1-8b", lengths="131072", method="full,pariskv-plus:retrieved=100", steps="captured",
        new_tokens=64, sums=Path, unchecked=False, profile=False, host_memory=int, out=Path, commit=str,
    )  # fmt: skip
    with processes(given.tp) as rank:
        device, name = where()
        report = Report(given.out if rank == 0 else None, given.commit)
        apart = Report(given.sums if rank == 0 else None, given.commit)
        for line in sums(device, given.tp) if given.sums else ():
            if rank == 0:
                apart(line)
        how = printing(given.out) if rank == 0 else {"note": noted}
        bench = SplitBench(ResultsFile(given.out), commit=given.commit, tp=given.tp, host_bytes=given.host_memory, **how)
        bench.report, bench.unchecked = report, given.unchecked
        wanted: dict[str, Any] = {
            "budget": None,
            "retrieved": None,
            "dense_layers": None,
            "seed": 0,
            "new_tokens": given.new_tokens,
        }
        wanted |= {"shape": given.shape, "prompt": "filled", "device": f"{given.tp} x {name}"}
        lengths = [int(length) for length in given.lengths.split(",")]
        settings = grid(given.method.split(","), lengths, [1], given.steps.split(","), **wanted)
        bench.run(settings[:-1] if given.profile else settings)
        if given.profile:
            bench.profile = True
            bench.run(settings[-1:])


if __name__ == "__main__":
    run_as_script(main)
