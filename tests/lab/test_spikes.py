"""The benchmark of single steps: what it says of them."""

from __future__ import annotations

import gc

import pytest
import torch

from lab.bench.shapes import build
from lab.spikes import Events, measure


@pytest.mark.parametrize("filled", [False, True])
def test_steps_and_the_longest_of_them(filled: bool) -> None:
    found = measure(build("tiny", torch.device("cpu"), layers=1), "clusterkv-plus", 64, 30, filled=filled, budget=32)
    assert 0 < found["median_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["mean_over_median"] * found["median_ms"] == pytest.approx(found["mean_ms"])
    assert len(found["longest"]) == 8
    longest = found["longest"][0]
    assert longest["ms"] == round(found["max_ms"], 3)
    assert longest["step"] >= 6, "behind those that compile"
    assert found["over"]["1.1"] >= found["over"]["10.0"]


def test_what_happened_in_a_step() -> None:
    with Events() as events:
        for step in range(3):
            events.next()
            if step == 1:
                gc.collect()
    gc.collect()
    first, second = events.longest([5.0, 7.0, 6.0], 2)
    assert first["step"] == 1
    assert first["collected_ms"] > 0
    assert second == {"step": 2, "ms": 6.0}
