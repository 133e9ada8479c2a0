"""Work that is spread over steps."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvthaw.cache.streams import AuxStream

CPU = torch.device("cpu")


class Casts(TorchDispatchMode):
    """Counts what becomes bfloat16, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") == torch.bfloat16:
            self.of[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_a_weight_that_the_side_stream_casts_is_no_other_streams() -> None:
    """Autocast keeps weights that it casts. Another stream that reads them would not wait for this one."""
    product, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        AuxStream().run(CPU, lambda: product(x))
        for _ in range(2):
            product(x)
    assert casts.of[product.weight.data_ptr()] == 2


@pytest.mark.gpu
def test_gpu_a_cast_on_the_side_stream_that_is_late(device: torch.device) -> None:
    product, x = torch.nn.Linear(1024, 1024, device=device), torch.randn(2, 1024, device=device)

    def late() -> None:
        torch.cuda._sleep(1 << 28)
        product(x)

    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        AuxStream().run(device, late)
        found = product(x)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(found, product(x))


def test_work_is_spread_evenly_in_order() -> None:
    aux, done = AuxStream(), list[str]()
    for name in "ab":
        aux.spread(CPU, [partial(done.append, f"{name}{i}") for i in range(4)], 3)
    sizes = []
    for _ in range(3):
        before = len(done)
        aux.advance()
        sizes.append(len(done) - before)
    assert sizes == [3, 3, 2]
    assert done == [f"{name}{i}" for name in "ab" for i in range(4)]
    aux.advance()
    assert len(done) == 8


def test_work_is_done_when_it_is_due_whatever_is_due_besides() -> None:
    aux, done = AuxStream(), list[str]()
    aux.spread(CPU, [partial(done.append, "a")] * 8, 8)
    for _ in range(2):
        aux.advance()
    aux.spread(CPU, [partial(done.append, "b")] * 6, 2)  # behind the other, and due before it
    aux.spread(CPU, [partial(done.append, "c")] * 4, 20)
    sizes = []
    for _ in range(4):
        before = len(done)
        aux.advance()
        sizes.append(len(done) - before)
    assert sizes == [6, 6, 1, 1]
    assert "".join(done[:14]) == 8 * "a" + 6 * "b"


def test_work_is_finished_when_it_is_needed_and_dropped_when_it_is_not() -> None:
    aux, done = AuxStream(), list[str]()
    first, second, third = (aux.spread(CPU, [partial(done.append, f"{name}{i}") for i in range(2)], 6) for name in "abc")
    aux.advance()
    aux.finish(second)
    aux.cancel(first)
    assert done == ["a0", "b0", "b1"]
    for _ in range(4):
        aux.advance()
    aux.finish(third)
    assert done == ["a0", "b0", "b1", "c0", "c1"]


def test_work_without_memory_is_taken_again_where_it_is_needed(device: torch.device) -> None:
    aux, tried, x, made = AuxStream(), list[str](), torch.arange(1 << 18, device=device), list[torch.Tensor]()

    def first() -> None:
        tried.append("first")
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")
        made.append(x + 1)

    work = aux.spread(device, [first, lambda: made.append(2 * made[0])], 2, x)
    aux.advance()
    assert not made
    aux.finish(work)
    if work.done is not None:
        torch.cuda.current_stream(device).wait_event(work.done)
    assert tried == ["first", "first"]
    assert torch.equal(made[1], 2 * x + 2)
