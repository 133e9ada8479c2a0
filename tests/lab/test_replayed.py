"""Real text's keys and queries for a model that has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw import ConfigError
from kvthaw.bench import shapes
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.engine.hf.model import make_config
from lab.filled import FilledBench, FilledChecks
from lab.replayed import Record
from timed import measured, settings, tinier

pytestmark = pytest.mark.model
_LENGTH = 300


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """For heads as large as the shipped model's, and for larger and more of them."""
    made = [make_config(**tinier(8, 4, 64)), make_config(**tinier(32, 8, 96))]
    return [Record(config, _LENGTH, torch.device("cpu")) for config in made]


def test_logits_stay_what_they_were(records: list[Record]) -> None:
    own, larger = records
    for layer in (0, 7):
        logits = []
        for record in records:
            rows, steps = record.tokens(layer, _LENGTH).rows[0], record.steps(layer)
            assert rows.shape == (record.heads, _LENGTH, 2, record.dim)
            assert steps.shape == (RECENT_QUERIES, record.q_heads, record.dim)
            grouped = steps.unflatten(1, (record.heads, -1)) * record.dim**-0.5
            logits.append(torch.einsum("whgd,hnd->whgn", grouped, rows[:, :, 0]))
        for head in range(8):
            for query in range(4):
                torch.testing.assert_close(logits[1][:, head, query], logits[0][:, head % 4, query % 2], rtol=1e-4, atol=1e-4)
    assert not torch.equal(own.steps(0), own.steps(1))
    torch.testing.assert_close(own.tokens(1, _LENGTH).rows[..., 0, :], larger.tokens(1, _LENGTH).rows[:, :4, :, 0, :64])


def test_longer_prompts_repeat_the_text(records: list[Record]) -> None:
    rows = records[0].tokens(1, 2 * _LENGTH + 7).rows
    assert torch.equal(rows[:, :, _LENGTH : 2 * _LENGTH], rows[:, :, :_LENGTH])
    assert torch.equal(rows[:, :, -7:], rows[:, :, :7])


def test_text_finds_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", tinier(8, 4, 64))
    monkeypatch.setattr(FilledChecks, "__call__", lambda *_: None)  # tested elsewhere
    asked: dict[str, Any] = {"lengths": [400], "new_tokens": 12, "batches": [2], "of": FilledBench}
    text, random = (measured("oracle", prompt=prompt, **asked)[0]["hit_rate"] for prompt in ("text", "filled"))
    assert text > random + 0.1


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hits is 0\.7; with prompt='text' the text says"):
        settings("quest", prompt="text", hits=0.7)
    with pytest.raises(ConfigError, match="keys have 64 dimensions; the shape's head_dim is 32"):
        Record(make_config(**tinier(8, 2, 32)), 200, torch.device("cpu"))
