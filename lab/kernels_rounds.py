"""How the rows that fill a budget are found among scored units: by halves as in kernels/unit_select.py, or several bits a round,
whose sums one reduction brings.

Each of `programs` programs has `units` scores and sizes; us: of a launch in a graph of 16. What each way takes is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvthaw.kernels.unit_select import _cut, _taken
from lab.kernels import demand, micros, replay_time
from lab.script import run_kernels

HALVES, ROOM = 0, 976


@triton.jit
def _by_digits(key, size, room, BITS: tl.constexpr):
    # As _taken, BITS bits a round: the rows at or above each of their values.
    low, step, above = tl.full([], -0x80000000, tl.int64), tl.full([], 1 << 32, tl.int64), tl.full([], 0, tl.int32)
    value = tl.arange(0, 1 << BITS).to(tl.int64)
    for _ in range(32 // BITS):
        step = step >> BITS
        least = (low + value * step).to(tl.int32)
        found = tl.sum(tl.where(key[None, :] >= least[:, None], size[None, :], 0), axis=1)
        fills = found >= room
        above = tl.maximum(above, tl.max(tl.where(fills | (value == 0), 0, found)))
        low += tl.sum((fills & (value > 0)).to(tl.int64)) * step
    take, _ = _cut(key, size, low.to(tl.int32), room - above)
    return take


@triton.jit
def _take(keys, sizes, took, room, N: tl.constexpr, BITS: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    key, size = tl.load(keys + i), tl.load(sizes + i)
    if BITS == 0:
        tl.store(took + i, _taken(key, size, room))
    else:
        tl.store(took + i, _by_digits(key, size, room, BITS))


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure; a line a way."""
    for programs, units in ((8, 2048),) if quick else ((8, 2048), (32, 1024)):
        keys, sizes = drawn(programs, units, "cuda")
        want = take(keys, sizes, ROOM, HALVES, 4)()
        for bits in (HALVES, 2, 4):
            for warps in (8,) if quick else (4, 8):
                call = take(keys, sizes, ROOM, bits, warps)
                demand(torch.equal(call(), want), f"{bits} bits a round take other rows")
                yield {
                    "op": "rounds",
                    "programs": programs,
                    "units": units,
                    "bits": bits or "halves",
                    "warps": warps,
                    "us": micros(replay_time([call] * 16)),
                }


def drawn(programs: int, units: int, device: str) -> tuple[Tensor, Tensor]:
    """Scores as integers of the same order, some of them equal, and sizes of some 32 rows, some of them 0."""
    bits = torch.randn(programs, units, device=device).mul(64).round().div(64).float().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), torch.randint(
        0, 64, (programs, units), dtype=torch.int32, device=device
    )


def take(keys: Tensor, sizes: Tensor, room: int, bits: int, warps: int) -> Callable[[], Tensor]:
    """Return a call that returns the rows taken of each unit, [programs, units]."""
    programs, units = keys.shape

    def call() -> Tensor:
        took = torch.empty_like(sizes)
        _take[(programs,)](keys, sizes, took, room, N=units, BITS=bits, num_warps=warps)
        return took

    return call


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "kernels"})
