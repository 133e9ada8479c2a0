"""Blocks on the device that requests leave are given out again behind the work that may read them."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache.device_memory import BlockArena


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
