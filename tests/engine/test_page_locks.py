"""What page-locks host memory while a prompt comes in chunks: a thread beside the steps, which others' tokens do not wait for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Batch, Scheduler
from kvthaw.cache import host_memory, page_locked
from kvthaw.cache.host import HostStore
from kvthaw.cache.page_locked import PageLocked
from zoo import build_exact, prompt

LAYERS, BLOCK, PAGE = 4, 16, 4096
LONG = 300


class Locks:
    """Stands in for CUDA's page-locking. calls: of each the blocks, and whether the thread that takes the steps made it; held:
    bytes that are page-locked; free: what the system has."""

    def __init__(self) -> None:
        self.calls, self.held, self.free = list[tuple[int, bool]](), dict[int, int](), 1 << 40

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    """Blocks are page-locked on a CPU, in small pages."""
    found, own, make, lock = Locks(), threading.get_ident(), HostStore.__init__, page_locked.page_lock

    def pinned(store: HostStore, *args: Any, **how: Any) -> None:
        make(store, *args, **how | {"pinned": True})

    def noted(size: int, blocks: int, runtime: Any) -> Any:
        found.calls.append((blocks, threading.get_ident() == own))
        return lock(size, blocks, runtime)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(HostStore, "__init__", pinned)
    monkeypatch.setattr(page_locked, "page_lock", noted)
    monkeypatch.setattr(host_memory, "_page_locked", PageLocked(lambda: found.free, lambda: found))
    for module in (page_locked, host_memory):
        monkeypatch.setattr(module, "HUGE", PAGE)
    yield found
    gc.collect()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=LAYERS)


def made(model: PreTrainedModel, **how: Any) -> Scheduler:
    """A scheduler in whose batch one sequence decodes."""
    how = {"max_seqs": 2, "capacity": 400, "budget": 48, "block_size": BLOCK} | how
    scheduler = Scheduler(Batch(model, "quest", **how), step_tokens=24)
    first = scheduler.submit(prompt(1, 20)[0], max_new_tokens=100, stop=())
    while not first.tokens:
        scheduler.step()
    return scheduler


def step(scheduler: Scheduler) -> None:
    """Take a step, and let the thread beside it come to an end."""
    scheduler.step()
    scheduler.batch.cache.kv.streams.drain()


def test_no_step_page_locks_what_a_prompt_needs(model: PreTrainedModel, locks: Locks) -> None:
    """The first chunk takes its own; each one after it finds its blocks, and the last one the block behind the prompt too, which
    each layer took by a call of its own."""
    scheduler = made(model)
    long = scheduler.submit(prompt(1, LONG)[0], max_new_tokens=4, stop=())
    step(scheduler)
    locks.calls.clear()
    while not long.tokens:
        step(scheduler)
    assert not [blocks for blocks, own in locks.calls if own]
    assert sum(blocks for blocks, _ in locks.calls) <= LAYERS * (LONG // BLOCK + 2), "and some that the others took meanwhile"


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_what_a_prompt_no_longer_needs_is_not_taken(
    model: PreTrainedModel, locks: Locks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    scheduler, jobs = made(model), list[Any]()
    monkeypatch.setattr(scheduler.batch.cache.kv.streams, "run_beside", jobs.append)  # which comes late
    long = scheduler.submit(prompt(1, LONG)[0], max_new_tokens=4, stop=())
    scheduler.step()
    locks.calls.clear()
    assert jobs
    if end == "cancel":
        scheduler.cancel(long)
    else:
        monkeypatch.setattr(scheduler.batch.prompts, "_run", lambda *_: 1 / 0)
        scheduler.step()
        assert isinstance(long.error, ZeroDivisionError)
    for job in jobs:
        job()
    assert not locks.calls


def test_no_more_is_taken_ahead_than_limits_leave(model: PreTrainedModel, locks: Locks) -> None:
    """Of host_bytes all that the prompt needs, of the system's memory a quarter; the rest where it is needed, as without."""
    tight = made(model)
    size = host_memory.held_bytes(tight.batch.cache.kv.offloaded[0].store.block_bytes, pinned=True)
    locks.free = 4 * size * 5
    long = tight.submit(prompt(1, LONG)[0], max_new_tokens=1, stop=())
    while not long.finished:
        step(tight)
        assert host_memory._page_locked.spare_bytes <= max(5, LAYERS * 2) * size
    limit = LAYERS * size * (LONG // BLOCK + 6)
    limited = made(model, host_bytes=limit)
    memory, locks.free = limited.batch.cache.kv.streams.memory, 1 << 40
    long = limited.submit(prompt(1, LONG)[0], max_new_tokens=1, stop=())
    while not long.finished:
        step(limited)
        assert memory.used + host_memory._page_locked.spare_bytes <= limit
