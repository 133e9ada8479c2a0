"""Tokens do not depend on where blocks lie; `check` exits with an error if they do, or if no block has moved."""

from __future__ import annotations

import pytest
import torch

from lab.bench.shapes import build
from lab.placement import check


@pytest.mark.parametrize(("method", "sizes"), [("clusterkv", {"budget": 64}), ("pariskv", {"budget": 64})])
def test_eager_steps(small: None, method: str, sizes: dict[str, int]) -> None:
    check(build("tiny", torch.device("cpu")), method, sizes, length=150, steps=50, block_size=16)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["clusterkv", "pariskv", "prkv", "icecache-digest-device", "oracle"])
def test_captured_steps(method: str) -> None:
    check(build("tiny", torch.device("cuda")).float(), method, {"budget": 256})
