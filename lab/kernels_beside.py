"""A layer's MLP while rows come over the bus: what each costs the other, by programs of the fetching kernel.

`python -m lab.kernels_beside --out kernels_beside.jsonl` on a GPU. The products of the 8B shape's MLP, 352 MB of weights for one
token, read device memory; `uva_gather` reads rows of 512 bytes from pinned host memory. One JSON line for a number of rows and of
programs: mlp_us and fetch_us alone, both_us together, on two streams of one graph. Where neither is in the other's way both_us is
the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.kernels.uva_gather import PROGRAMS, uva_gather
from kvthaw.regions import Regions
from lab.kernels import DIM, HEADS, SHAPE, copies, micros, replay_time
from lab.script import run_kernels

HIDDEN, INNER = 4096, 14336


def products() -> list[Callable[[], object]]:
    """Return calls that compute an MLP each, with weights that are not in the cache."""
    device, many = torch.device("cuda"), copies(3 * HIDDEN * INNER * 2)
    x = torch.randn((1, HIDDEN), dtype=torch.bfloat16, device=device)
    weights = [
        tuple(
            torch.randn(size, dtype=torch.bfloat16, device=device)
            for size in ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
        )
        for _ in range(max(4, many))
    ]

    def one(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    return [partial(one, *each) for each in weights]


def fetches(rows: int, tokens: int, programs: int, calls: int) -> list[Callable[[], object]]:
    """Return calls that fetch `rows` random rows for each of 8 heads."""
    store = HostStore(1, HEADS, DIM, torch.bfloat16, pinned=True)
    for start in range(0, tokens, 8192):
        store.append(0, torch.randn(HEADS, min(8192, tokens - start), 2, DIM).to(torch.bfloat16))
    slab = Slab(1, HEADS, DIM, Regions(0, 1, 1), rows, dtype=torch.bfloat16, device=torch.device("cuda"))
    table, slots = store.table.on_cpu().cuda(), torch.arange(rows, dtype=torch.int32).expand(1, HEADS, -1).contiguous().cuda()
    wanted = [torch.randint(0, tokens, (1, HEADS, rows), dtype=torch.int32).cuda() for _ in range(calls)]

    def one(fetch: torch.Tensor) -> None:
        uva_gather(table, store.block_size, slab.data, fetch, slots, slab.pool_start, programs=programs)

    return [partial(one, fetch) for fetch in wanted]


def together(first: Callable[[], object], second: Callable[[], object], side: torch.cuda.Stream) -> Callable[[], object]:
    """Return a call that runs the second on a side stream during the first."""

    def both() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            second()
        first()
        current.wait_stream(side)

    return both


def lines(*, rows: str, programs: str, tokens: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a line for each number of rows and of programs."""
    mlp, side = products(), torch.cuda.Stream(priority=-1)
    alone = replay_time(mlp)
    for many in map(int, rows.split(",")):
        for limit in map(int, programs.split(",")):
            bring = fetches(many, tokens, limit, len(mlp))
            both = [together(first, second, side) for first, second in zip(mlp, bring, strict=True)]
            took = {"mlp_us": alone, "fetch_us": replay_time(bring), "both_us": replay_time(both)}
            yield {"rows": many, "programs": limit, "tokens": tokens, **{name: micros(value) for name, value in took.items()}}
            if quick:
                return


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE | {"op": "beside"}, rows="256,80", programs=f"32,64,128,256,512,{PROGRAMS}", tokens=65536)
