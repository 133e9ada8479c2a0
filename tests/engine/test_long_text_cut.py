"""Texts that are too long for a model, without their middle."""

from __future__ import annotations

from typing import Any

import pytest

from kvthaw import ConfigError
from kvthaw.engine.cut import without_middle


@pytest.fixture
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


def test_a_text_that_fits_stays_whole(tokenizer: Any) -> None:
    text = "The grass is green. " * 10
    assert without_middle(tokenizer, text, 200) == (text, 0)


@pytest.mark.parametrize("most", [70, 100, 199])
@pytest.mark.parametrize("times", [10, 10_000])
def test_a_longer_one_has_its_beginning_and_its_end(tokenizer: Any, most: int, times: int) -> None:
    text = "It began so. " + "The grass is green. " * times + "It ended so."
    cut, left_out = without_middle(tokenizer, text, most)
    start, end = cut.split(f"\n\n[... {left_out:,} characters are left out here ...]\n\n")
    assert text.startswith(start)
    assert text.endswith(end)
    assert min(len(start), len(end)) > 0
    assert len(start) + len(end) + left_out == len(text)
    assert len(tokenizer(cut)["input_ids"]) <= most


def test_too_few_tokens_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="too few to cut it"):
        without_middle(tokenizer, "The grass is green. " * 10, 20)
