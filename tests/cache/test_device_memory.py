"""Blocks on the device are given out behind the work that may use their memory, whoever had it before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.cache.device_memory import _CHUNK, DeviceBlocks, DeviceMemory, uncollected
from kvthaw.cache.streams import Streams


def test_the_last_thread_enables_the_collector_again() -> None:
    """A capture fails if a collection destroys an earlier graph, whatever another thread has ended meanwhile."""
    assert gc.isenabled()
    one, other = uncollected(), uncollected()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


def test_blocks_that_are_freed_together_wait_for_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 16k tokens in 30 layers leaves 500 of them; events for each took longer than half a decode step."""
    blocks_of, recorded = DeviceBlocks(DeviceMemory(1 << 30, [0]), 0, (2, 4), torch.float32, torch.device("cpu")), []
    monkeypatch.setattr(blocks_of, "readers", lambda: recorded.append(len(blocks_of._ready)) or [])
    blocks = [blocks_of.take(1)[0] for _ in range(10)]
    left = blocks_of._ready[0][0].data_ptr()
    blocks_of.note_freed()
    assert recorded == []
    del blocks[:9]
    blocks_of.note_freed()
    assert recorded == [2 * _CHUNK - 10]  # before any of the nine could be given out
    assert len(blocks_of._ready) == 2 * _CHUNK - 1
    assert blocks_of.take(1)[0].data_ptr() != blocks[0].data_ptr() != left


def test_a_block_in_use_keeps_nothing_alive_but_its_memory() -> None:
    """A bound method as finalizer kept the blocks of a cache that was gone, and all of its device memory."""
    memory = DeviceMemory(1 << 20, (0,))
    blocks = DeviceBlocks(memory, 0, (2, 4), torch.float32, torch.device("cpu"))
    kept, left = blocks.take(1)[0], [blocks.take(1)[0] for _ in range(8)]
    assert blocks.used == 9 * blocks.size
    left.clear()
    assert blocks.used == blocks.size
    gone = weakref.ref(blocks)
    memory.reset()
    del blocks
    assert kept is not None
    assert gone() is None


def test_blocks_are_taken_together_as_far_as_there_is_room() -> None:
    memory = DeviceMemory(1000, (0,))
    blocks = DeviceBlocks(memory, 0, (2, 4), torch.float32, torch.device("cpu"))
    some = blocks.take(20)
    assert len({block.data_ptr() for block in some}) == len(some) == 20
    more = blocks.take(20)
    assert len(more) == 1000 // 32 - 20
    assert blocks.take(1) == blocks.take(0) == []
    del some[:3]
    assert len(blocks.take(5)) == 3


@pytest.mark.gpu
def test_a_stream_waits_for_work_on_memory_that_blocks_come_to() -> None:
    """Memory that the model's stream has freed and not yet written to for the last time."""
    device, memory, stream = torch.device("cuda"), DeviceMemory(offloaded=[0]), torch.cuda.Stream()
    memory.bytes = 1 << 40  # without a limit there is no pool apart from the freed memory
    blocks_of = DeviceBlocks(memory, 0, (1 << 20,), torch.float32, device)
    freed = torch.zeros((_CHUNK, 1 << 20), device="cuda")
    begin = freed.data_ptr()
    torch.cuda._sleep(100_000_000)
    freed.fill_(1)
    del freed
    with torch.cuda.stream(stream):
        block = blocks_of.take(1)[0]
        assert block.data_ptr() == begin
        block.fill_(2)
    torch.cuda.synchronize()
    assert block.eq(2).all()


@pytest.mark.gpu
def test_what_lasts_takes_no_part_of_freed_activations() -> None:
    """A prompt on a card that was just large enough ended with no memory: of each layer's freed activations a part was taken."""
    device, size, kept = torch.device("cuda"), 64 << 20, []
    memory, before = DeviceMemory("auto", (0,)), torch.cuda.memory_reserved()
    for _ in range(8):
        activations = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(3)]
        del activations
        kept.append(memory.allocate(device, lambda: torch.empty(40 << 20, dtype=torch.uint8, device=device)))
    assert torch.cuda.memory_reserved() - before <= 3 * size + 8 * (40 << 20)


@pytest.fixture
def small_gpu() -> Iterator[int]:
    """Limit torch to 1 GiB of the GPU beyond what it has now. Yields these bytes."""
    torch.cuda.empty_cache()
    total, before = torch.cuda.mem_get_info()[1], torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    yield 1 << 30
    torch.cuda.set_per_process_memory_fraction(before)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_what_lasts_takes_memory_that_torch_keeps_of_activations(small_gpu: int) -> None:
    """A server that switched to the method ended here: torch frees nothing that it caches for a pool."""
    device, memory = torch.device("cuda"), DeviceMemory("auto", (0,))
    activations = torch.empty(small_gpu * 3 // 4, dtype=torch.uint8, device=device)
    del activations
    assert memory.allocate(device, lambda: torch.empty(small_gpu // 2, dtype=torch.uint8, device=device)).is_cuda
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(device, lambda: torch.empty(2 * small_gpu, dtype=torch.uint8, device=device))


@pytest.mark.gpu
def test_the_blocks_of_layers_return_to_the_device_layer_by_layer(small_gpu: int) -> None:
    """While the method takes over, a layer's index needs the memory that full attention's blocks of others had."""
    device, memory, size = torch.device("cuda"), DeviceMemory(1 << 40, range(4)), (1 << 20,)
    layers = [DeviceBlocks(memory, layer, size, torch.float32, device) for layer in range(4)]
    blocks = [
        [blocks_of.take(1)[0] for blocks_of in layers] for _ in range(9 * _CHUNK)
    ]  # a token's of all layers after each other
    memory.leave_pool()
    for layer in range(4):
        for block in blocks:
            block[layer] = torch.empty(0)
        memory.trim(device)
        index = memory.allocate(device, lambda: torch.empty(9 * _CHUNK << 22, dtype=torch.uint8, device=device))
        for block in blocks[:1]:
            block[layer] = index
    assert all(index.is_cuda for index in blocks[0])


@pytest.mark.gpu
def test_memory_of_a_reset_cache_returns_to_the_device(small_gpu: int) -> None:
    device, memory = torch.device("cuda"), DeviceMemory("auto", (0,))
    kept = [memory.allocate(device, lambda: torch.empty(small_gpu // 4, dtype=torch.uint8, device=device)) for _ in range(3)]
    kept.clear()
    memory.reset()
    assert torch.empty(small_gpu * 7 // 8, dtype=torch.uint8, device=device).is_cuda


@pytest.mark.gpu
def test_a_cache_that_is_garbage_does_not_end_the_process() -> None:
    """torch ends it if a MemPool is destroyed within another's context, where the collector may run, on this or another thread."""
    device = torch.device("cuda")

    def abandoned() -> None:
        left: Any = DeviceMemory("auto", (0,))
        left.allocate(device, lambda: torch.empty(1 << 20, device=device))
        left.itself = left

    def collect() -> Tensor:
        gc.collect()
        with ThreadPoolExecutor(1) as other:
            abandoned()
            other.submit(gc.collect).result()
        return torch.empty(1 << 20, device=device).fill_(1)

    abandoned()
    memory = DeviceMemory("auto", (0,))
    kept = [memory.allocate(device, collect) for _ in range(4)]
    assert all(bool(each.eq(1).all()) for each in kept)


@pytest.mark.gpu
def test_what_goes_beside_the_model_comes_after_what_it_was_given() -> None:
    """A block is copied where a sequence writes into one that it shares, perhaps to memory taken on the model's stream."""
    streams, device = Streams(), torch.device("cuda")
    block, copy = torch.zeros((2, 1 << 16), device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    block.fill_(1)
    copy.fill_(2)
    with streams.beside(device):
        copy.copy_(block)
    torch.cuda.synchronize()
    assert copy.eq(1).all()
