"""Blocks on the device are given out behind the work that may use their memory, whoever had it before."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache.device_memory import BlockArena, DeviceMemory, allocating
from kvthaw.cache.streams import Streams


def test_blocks_that_are_freed_together_wait_for_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 16k tokens in 30 layers leaves 500 of them; events for each took longer than half a decode step."""
    arena, recorded = BlockArena((2, 4), torch.float32, torch.device("cpu"), ()), []
    monkeypatch.setattr(arena, "readers", lambda: recorded.append(len(arena._ready)) or [])
    blocks = [arena.take() for _ in range(10)]
    left = arena._ready[0][0].data_ptr()
    arena.note_freed()
    assert recorded == []
    del blocks[:9]
    arena.note_freed()
    assert recorded == [6]  # before any of the nine could be given out
    assert len(arena._ready) == 15
    assert arena.take().data_ptr() != blocks[0].data_ptr() != left


@pytest.mark.gpu
def test_a_stream_waits_for_work_on_memory_that_blocks_come_to() -> None:
    """Memory that the model's stream has freed and not yet written to for the last time."""
    arena, stream = BlockArena((1 << 16,), torch.float32, torch.device("cuda"), []), torch.cuda.Stream()
    freed = torch.zeros((16, 1 << 16), device="cuda")
    begin = freed.data_ptr()
    torch.cuda._sleep(100_000_000)
    freed.fill_(1)
    del freed
    with torch.cuda.stream(stream):
        block = arena.take()
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
        with allocating(memory.pool(device), device):
            kept.append(torch.empty(40 << 20, dtype=torch.uint8, device=device))
    assert torch.cuda.memory_reserved() - before <= 3 * size + 8 * (40 << 20)


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
