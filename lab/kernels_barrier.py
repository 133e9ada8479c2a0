"""What joins two parts of a layer's retrieval: a dependent launch between two kernels, or a barrier of the whole grid within one.

us: of one more launch or barrier, from graphs with 16 and 64 of them. Each program stores a number and reads its neighbour's of the
round before, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvthaw.kernels.chain import dependent, follow
from lab.kernels import demand, micros, replay_time
from lab.script import run_kernels

FEW, MANY = 16, 64


@triton.jit
def _launched(numbers, PDL: tl.constexpr):
    # One round: program i adds 1 to what its neighbour had.
    follow(PDL)
    i, n = tl.program_id(0), tl.num_programs(0)
    tl.store(numbers + n + i, tl.load(numbers + (i + 1) % n) + 1)


@triton.jit
def _persistent(numbers, arrived, ROUNDS: tl.constexpr):
    # The same for all rounds, with a barrier of all programs behind each. All must run at once.
    i, n = tl.program_id(0), tl.num_programs(0)
    for r in range(ROUNDS):
        tl.store(numbers + (r + 1) * n + i, tl.load(numbers + r * n + (i + 1) % n, cache_modifier=".cg") + 1)
        tl.debug_barrier()
        tl.atomic_add(arrived, 1, sem="acq_rel")
        while tl.load(arrived, volatile=True) < (r + 1) * n:
            pass
        tl.debug_barrier()


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure; a line a way and number of programs."""
    for programs in (132,) if quick else (64, 132, 264, 528):
        for warps in (4,) if quick else (1, 4):
            for way in (launches, barriers):
                few, many = (replay_time([way(programs, warps, rounds)]) for rounds in (FEW, MANY))
                each = (many - few) / (MANY - FEW)
                yield {
                    "op": way.__name__,
                    "programs": programs,
                    "warps": warps,
                    "us": micros(each),
                    f"us_of_{FEW}": micros(few),
                }


def launches(programs: int, warps: int, rounds: int) -> Callable[[], None]:
    """Return a call that launches a kernel for each round."""
    numbers = torch.zeros((rounds + 1, programs), dtype=torch.int32, device="cuda")
    how = dependent(numbers.device)

    def run() -> None:
        for at in range(rounds):
            _launched[(programs,)](numbers[at:], num_warps=warps, **how)

    return checked(run, numbers)


def barriers(programs: int, warps: int, rounds: int) -> Callable[[], None]:
    """Return a call that launches one kernel for all rounds."""
    numbers = torch.zeros((rounds + 1, programs), dtype=torch.int32, device="cuda")
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run() -> None:
        arrived.zero_()
        _persistent[(programs,)](numbers, arrived, ROUNDS=rounds, num_warps=warps)

    return checked(run, numbers)


def checked(run: Callable[[], None], numbers: Tensor) -> Callable[[], None]:
    """Run once and check what is there."""
    run()
    torch.cuda.synchronize()
    expected = torch.arange(len(numbers), dtype=torch.int32, device=numbers.device)[:, None].expand_as(numbers)
    demand(torch.equal(numbers, expected), "a program read its neighbour's number before it was there")
    return run


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "kernels"})
