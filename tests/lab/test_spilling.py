"""The benchmark of blocks that move: they do, one way and the other."""

from __future__ import annotations

import torch

from lab.bench.shapes import build
from lab.spilling import measure


def test_blocks_spill_and_come_back() -> None:
    model = build("tiny", torch.device("cpu"), layers=1)
    found = measure(model, "quest", 2, 128, 60, 400_000, budget=32, block_size=8)
    assert found["moved"]
    assert found["spilling"]["moved_blocks"] >= found["spilling"]["host_blocks"] > 0
    assert found["returning"]["moved_blocks"] >= -found["returning"]["host_blocks"] > 0
    everywhere = measure(model, "quest", 2, 128, 60, 1 << 30, budget=32, block_size=8)
    assert not everywhere["moved"]
    assert everywhere["spilling"]["moved_blocks"] == everywhere["returning"]["moved_blocks"] == 0
