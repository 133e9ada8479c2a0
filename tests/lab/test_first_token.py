"""The benchmark of first tokens, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from lab import first_token
from lab.bench.shapes import build


@pytest.mark.parametrize("method", ["full", "pariskv-plus"])
def test_a_prompt_is_timed(method: str) -> None:
    model = build("tiny", torch.device("cpu"), layers=1)
    line = first_token.prompt(model, method, 300, 128, 1)
    assert (line["tokens"], line["chunk"], line["method"]) == (300, 128, method)
    assert 0 < line["seconds"] <= line["indexed_s"]
