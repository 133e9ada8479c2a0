"""One layer alone on given keys, values and queries: what of its attention is covered, and how far its output is off."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from lab.real_keys import measure


def test_mass_and_error_are_full_attention_s() -> None:
    torch.manual_seed(0)
    head = {"keys": torch.randn(308, 16), "values": torch.randn(308, 16), "queries": 2 * torch.randn(3, 308, 16)}
    head["scale"] = torch.tensor(0.5, dtype=torch.float64)

    def means(method: str, budget: int) -> list[float]:
        return [fmean(column) for column in zip(*measure(head, method, budget, 3), strict=True)]

    mass, error, attended = means("icecache-digest", 400)
    assert mass == pytest.approx(1)
    assert error < 1e-3
    assert 300 < attended <= 308
    exact, window = means("oracle", 64), means("streaming", 64)
    assert window[0] < exact[0] < 1
    assert exact[1] < window[1]
    assert max(exact[2], window[2]) <= 64
