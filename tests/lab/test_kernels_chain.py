"""The launches of a layer, under the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lab import kernels_chain, timings


def test_a_chain_attends_to_what_it_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_chain, "LAYERS", 1)
    monkeypatch.setattr(kernels_chain, "ROWS", 64)
    with torch.inference_mode():
        line = kernels_chain.chain("prkv", 1024, device="cpu")
    assert line == {"op": "chain", "method": "prkv", "tokens": 1024, "fp8": False}


def test_jobs_can_be_named() -> None:
    assert timings.job("steps pariskv-plus:retrieved=100 128 512") == (12, "steps", ("pariskv-plus:retrieved=100", 128, 512))
