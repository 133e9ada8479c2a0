"""Page-locked memory: used again, given back, and never while the device may read it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw.cache import host_memory, page_locked
from kvthaw.cache.host_memory import HostMemory, container_free, host_tensor
from kvthaw.cache.page_locked import HUGE, PageLocked, locked_bytes, page_lock
from kvthaw.cache.streams import Streams

SHAPE = 2, HUGE // 8, 2
"""Of a block of bfloat16 that takes as much as a huge page."""


class Runtime:
    """CUDA's calls: what is page-locked now, and how many bytes may be."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.limit, self.locked = 1 << 40, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address % HUGE == 0
        if sum(self.held.values()) + size > self.limit:
            return 2
        self.held[address] = size
        self.locked += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


class Stream:
    """A stream whose work is done when it is told."""

    def __init__(self) -> None:
        self.done = False

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def made(runtime: Runtime, free: int | None = None) -> PageLocked:
    return PageLocked(lambda: free, lambda: runtime)


def test_blocks_have_the_bytes_they_take(runtime: Runtime) -> None:
    memory = made(runtime)
    blocks = [memory.tensor(SHAPE, torch.bfloat16).fill_(i) for i in range(3)]
    assert [block.shape for block in blocks] == [SHAPE] * 3
    assert sorted(runtime.held) == sorted(block.data_ptr() for block in blocks)
    assert set(runtime.held.values()) == {HUGE}
    assert [float(block.sum()) for block in blocks] == [i * blocks[0].numel() for i in range(3)]
    assert [locked_bytes(n) for n in (1, 3 << 10, HUGE // 2 + 1, HUGE, HUGE + 1)] == [1, 4 << 10, HUGE, HUGE, 2 * HUGE]


def test_what_is_freed_is_used_again_once_nothing_may_read_it(runtime: Runtime) -> None:
    memory, stream = made(runtime), Stream()
    first = memory.tensor(SHAPE, torch.bfloat16, [stream])  # type: ignore[list-item]
    address = first.data_ptr()
    del first
    gc.collect()
    assert memory.spare_bytes == HUGE
    other = memory.tensor(SHAPE, torch.bfloat16)
    assert other.data_ptr() != address
    stream.done = True
    assert memory.tensor((HUGE // 4,), torch.float32).data_ptr() == address
    assert runtime.locked == 2


def test_what_is_too_much_is_given_back_when_the_device_is_done(runtime: Runtime) -> None:
    free, stream = 16 * HUGE, Stream()
    memory = made(runtime, free)
    blocks = [memory.tensor(SHAPE, torch.bfloat16, [stream]) for _ in range(9)]  # type: ignore[list-item]
    blocks.clear()
    gc.collect()
    held = memory.tensor(SHAPE, torch.bfloat16)
    assert len(runtime.held) < 9
    assert memory.spare_bytes * 4 <= free + 9 * HUGE
    assert stream.done
    assert held.data_ptr() in runtime.held


def test_threads_that_ask_at_once_take_nothing_twice(runtime: Runtime) -> None:
    """Both see the last block that is freed before either has taken it."""
    memory, together, failed = made(runtime), threading.Barrier(2), list[Exception]()

    class Freed(deque[Any]):
        def popleft(self) -> Any:
            with suppress(threading.BrokenBarrierError):
                together.wait(0.5)
            return super().popleft()

    memory._freed = Freed()
    first = memory.tensor(SHAPE, torch.bfloat16)
    del first
    gc.collect()

    def ask() -> None:
        try:
            assert memory.spare_bytes == HUGE
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_current_streams_of_all_devices_in_use_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is current on the thread that asks: one that is not in use stays so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number=0: f"current of {number}")
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number > 0, raising=False)
    own: Any = ["own"]
    assert page_locked._readers(own) == {"own", "current of 1", "current of 2"}


def test_a_view_keeps_its_memory(runtime: Runtime) -> None:
    memory = made(runtime, 1 << 40)
    view = memory.tensor(SHAPE, torch.bfloat16).fill_(3)[:1]
    other = memory.tensor(SHAPE, torch.bfloat16).fill_(4)
    assert len(runtime.held) == 2
    assert bool((view == 3).all())
    del memory, other
    gc.collect()
    assert bool((view == 3).all())
    del view
    gc.collect()
    assert not runtime.held


def test_many_are_prepared_at_once(runtime: Runtime) -> None:
    memory = made(runtime)
    memory.prepare(2 * SHAPE[0] * SHAPE[1] * SHAPE[2], 5)
    assert list(runtime.held.values()) == [5 * HUGE]
    blocks = [memory.tensor(SHAPE, torch.bfloat16).fill_(i) for i in range(5)]
    (begin,) = runtime.held
    assert sorted(block.data_ptr() for block in blocks) == [begin + i * HUGE for i in range(5)]
    assert [float(block[0, 0, 0]) for block in blocks] == [0, 1, 2, 3, 4]
    assert runtime.locked == 1
    runtime.limit = 6 * HUGE
    memory.prepare(HUGE, 4)  # of which there is not so much
    assert runtime.locked == 1


def test_what_will_be_asked_for_soon_is_taken_by_the_same_call(runtime: Runtime) -> None:
    """Layers ask one after the other, each for a few."""
    memory, blocks = made(runtime), []
    for _ in range(4):
        memory.prepare(HUGE, 2, 8)
        blocks += [memory.tensor(SHAPE, torch.bfloat16) for _ in range(2)]
    memory.prepare(HUGE, 2, 1000)
    assert list(runtime.held.values()) == [8 * HUGE, 128 * HUGE], "as much as one call takes"
    blocks += [memory.tensor(SHAPE, torch.bfloat16) for _ in range(128)]
    for _ in range(4):
        memory.prepare(HUGE, 1, 4)
        blocks.append(memory.tensor(SHAPE, torch.bfloat16))
    assert list(runtime.held.values())[2:] == [4 * HUGE], "where each asks for one, too"


def test_what_is_expected_is_taken_once_and_within_limits(runtime: Runtime) -> None:
    memory, free = made(runtime), [1 << 40]
    memory._available = lambda: free[0]
    held = memory.tensor(SHAPE, torch.bfloat16)
    assert memory.expect(HUGE, 200)
    memory.take_ahead()
    assert list(runtime.held.values()) == [HUGE, 128 * HUGE, 72 * HUGE]
    assert not memory.expect(HUGE, 200), "it is there"
    blocks = [memory.tensor(SHAPE, torch.bfloat16) for _ in range(150)]
    assert memory.expect(HUGE, 60), "ten are lacking: as many as were asked for come, not one by one"
    memory.take_ahead()
    assert memory.spare_bytes == 110 * HUGE
    assert memory.expect(HUGE, 120, most=113)
    memory.take_ahead()
    assert memory.spare_bytes == 113 * HUGE, "no more than there is room for"
    free[0] = 4 * 120 * HUGE
    assert memory.expect(HUGE, 300)
    memory.take_ahead()
    assert memory.spare_bytes == 113 * HUGE, "a quarter of what is free may stay unused"
    free[0] = 1 << 40
    memory.take_ahead()
    assert memory.spare_bytes == 113 * HUGE, "until it is asked for again"
    assert memory.expect(HUGE, 300)
    assert not memory.expect(HUGE, 0)
    memory.take_ahead()
    runtime.limit = 0
    assert memory.expect(HUGE, 300)
    memory.take_ahead()
    assert memory.spare_bytes == 113 * HUGE
    assert not any(memory._coming.values())
    del held, blocks


def test_half_of_what_is_kept_may_be_used_before_more_is_pinned(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made(runtime)
    monkeypatch.setattr(host_memory, "_page_locked", memory)
    cache, limited = HostMemory(), HostMemory(19 * HUGE)
    assert cache.short_of(40, HUGE)
    assert cache.expect(40, HUGE) is not None
    assert not cache.short_of(40, HUGE), "they are to be pinned"
    memory.take_ahead()
    assert list(runtime.held.values()) == [40 * HUGE]
    blocks = [memory.tensor(SHAPE, torch.bfloat16) for _ in range(20)]
    assert not cache.short_of(40, HUGE)
    blocks.append(memory.tensor(SHAPE, torch.bfloat16))
    assert not limited.short_of(40, HUGE)
    assert cache.short_of(40, HUGE)
    assert cache.expect(300, HUGE) is not None, "a prompt needs more"
    assert not cache.short_of(40, HUGE), "and gets it"
    memory.take_ahead()
    assert memory.spare_bytes == 300 * HUGE


def test_what_cuda_does_not_unpin_stays_mapped(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new mapping at its addresses would be read from the old physical pages."""
    left = list[Any]()
    monkeypatch.setattr(page_locked, "_STILL_PINNED", left)
    for failure in (0, 1):
        monkeypatch.setattr(runtime, "cudaHostUnregister", lambda address, failure=failure: failure)
        (block,) = page_lock(HUGE, 1, runtime)
        address = block.address
        del block
        assert [mapping.address for mapping in left] == [address] * failure
    ctypes.memset(left[0].address, 7, HUGE)


def test_tensors_are_taken_together(runtime: Runtime) -> None:
    memory = PageLocked(lambda: None, lambda: runtime)
    memory.prepare(HUGE, 2)
    found = memory.tensors(200, SHAPE, torch.bfloat16)
    assert sorted(runtime.held.values()) == [2 * HUGE, 70 * HUGE, 128 * HUGE], (
        "two were unused, others are pinned some at a time"
    )
    assert len({block.data_ptr() for block in found}) == 200
    assert memory.spare_bytes == 0


def test_what_lacks_memory_keeps_none(runtime: Runtime) -> None:
    memory = PageLocked(lambda: None, lambda: runtime)
    runtime.limit = 200 * HUGE
    with pytest.raises(OSError, match="cannot be pinned"):
        memory.tensors(300, SHAPE, torch.bfloat16)
    assert memory.spare_bytes == 128 * HUGE, "of no tensor"


def test_threads_do_not_take_each_others(runtime: Runtime) -> None:
    memory = PageLocked(lambda: None, lambda: runtime)
    with ThreadPoolExecutor(4) as threads:
        found = [block for own in threads.map(lambda _: memory.tensors(9, SHAPE, torch.bfloat16), range(8)) for block in own]
    assert (runtime.locked, memory.spare_bytes) == (8, 0), "one call each"
    assert len({block.data_ptr() for block in found}) == 72


def test_what_was_page_locked_together_is_given_back_together(runtime: Runtime) -> None:
    free = [200 * HUGE]
    memory = PageLocked(lambda: free[0], lambda: runtime)
    memory.prepare(HUGE, 200)
    assert sorted(runtime.held.values()) == [72 * HUGE, 128 * HUGE], "some at a time"
    blocks = [memory.tensor(SHAPE, torch.bfloat16) for _ in range(200)]
    held = {block.data_ptr() for block in blocks}
    assert len(held) == 200
    kept, free[0] = blocks[150], HUGE
    del blocks
    gc.collect()
    assert memory.spare_bytes in (72 * HUGE - HUGE, 128 * HUGE - HUGE), "but what has one in use"
    (size,) = runtime.held.values()
    assert size == memory.spare_bytes + HUGE
    del kept
    gc.collect()
    assert memory.spare_bytes == 0
    assert not runtime.held


def test_other_sizes_make_room(runtime: Runtime) -> None:
    """Memory that is unused and of another size goes back before there is said to be none."""
    free = [4 * HUGE]
    memory = PageLocked(lambda: free[0], lambda: runtime)
    held = memory.tensor(SHAPE, torch.bfloat16)
    del held
    gc.collect()
    free[0] = HUGE
    unregister = runtime.cudaHostUnregister

    def given_back(address: int) -> int:
        free[0] += HUGE
        return unregister(address)

    runtime.cudaHostUnregister = given_back  # type: ignore[method-assign]
    large = memory.tensor((HUGE,), torch.bfloat16)
    assert runtime.held == {large.data_ptr(): 2 * HUGE}
    free[0] = 0
    with pytest.raises(OSError, match="0 bytes are free"):
        memory.tensor(SHAPE, torch.bfloat16)


def test_what_cannot_be_page_locked_is_asked_of_torch(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    empty = torch.empty

    def torch_empty(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(host_memory, "_page_locked", made(runtime))
    monkeypatch.setattr(torch, "empty", torch_empty)
    memory = HostMemory(5 * HUGE)
    memory.prepare(9, HUGE, pinned=True)
    assert list(runtime.held.values()) == [5 * HUGE]
    block = memory.allocate(SHAPE, torch.bfloat16, pinned=True)
    assert (memory.used, asked) == (HUGE, [])
    runtime.limit = 0
    assert host_tensor((HUGE,), torch.bfloat16, pinned=True).numel() == HUGE
    assert asked == [True]
    del block
    assert memory.used == 0


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    assert container_free(tmp_path) is None
    for name, text in (
        ("memory.current", "900"),
        ("memory.stat", "anon 600\nactive_file 50\ninactive_file 25"),
        ("memory.max", "max"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert container_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_free(tmp_path) == 175
    (tmp_path / "memory.max").write_text("500\n")
    assert container_free(tmp_path) == 0


@pytest.mark.gpu
def test_the_device_reads_and_writes_it() -> None:
    block = host_tensor((3, HUGE // 4), torch.float32, pinned=True)
    assert block.is_pinned()
    assert block.data_ptr() % HUGE == 0
    there = torch.randn(block.shape, device="cuda")
    block.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(block, there.cpu())
    assert torch.equal(block.to("cuda", non_blocking=True), there)
    address = block.data_ptr()
    del block
    again = []
    for _ in range(3):  # the event behind which it is free is recorded by the first
        again.append(host_tensor((3, HUGE // 4), torch.float32, pinned=True))
        torch.cuda.synchronize()
    assert address in [each.data_ptr() for each in again]


@pytest.mark.gpu
def test_what_a_side_stream_reads_is_not_used_again_by_another_thread(device: torch.device) -> None:
    """A model that runs on a stream of its own, and a thread that notes what was freed."""
    cache, side = Streams(), torch.cuda.Stream(device)
    block = cache.memory.allocate((3, HUGE // 4), torch.float32, pinned=True).fill_(1)
    there, found = torch.empty(block.shape, device=device), list[torch.Tensor]()
    with torch.cuda.stream(side):
        cache.follow(device)
        torch.cuda._sleep(200_000_000)
        there.copy_(block, non_blocking=True)
    del block

    def ask() -> None:
        found.extend(host_tensor((3, HUGE // 4), torch.float32, pinned=True).fill_(2) for _ in range(4))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    side.synchronize()
    assert bool((there == 1).all())


@pytest.mark.gpu
def test_gpu_memory_is_taken_ahead_while_a_step_is_captured(device: torch.device) -> None:
    """By a thread that knows nothing of it."""
    cache, size = HostMemory(), SHAPE[0] * SHAPE[1] * SHAPE[2] * 2
    there, failed = torch.zeros(8, device=device), list[Exception]()

    def take() -> None:
        try:
            if (ahead := cache.expect(300, size)) is not None:
                ahead()
        except Exception as error:
            failed.append(error)

    thread, graph = threading.Thread(target=take), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        there.add_(1)
        thread.start()
        thread.join()
        there.add_(1)
    graph.replay()
    assert not failed
    assert host_memory._page_locked.spare_bytes >= 300 * HUGE
    block = cache.allocate(SHAPE, torch.bfloat16, pinned=True).fill_(1)
    assert bool((block.to(device, non_blocking=True) == 1).all())
    assert there.tolist() == [2.0] * 8
