"""The sentences of a prompt that an answer came from."""

from __future__ import annotations

import re

import torch

from kvthaw.inspect.passages import passages, sentences
from kvthaw.inspect.recorder import Recording

TEXT = "The cat sat on a mat all day. The grey dog ran to the old barn. A fox slept in the wood.\n\nThe end of it all."
PIECES = re.findall(r"\s*\S+", TEXT)


def recorded(*steps: list[list[int]]) -> Recording:
    """A recording of one layer, by step and head."""
    return Recording([{0: torch.tensor(step, dtype=torch.int32)} for step in steps])


def test_sentences_are_whole_and_cover_the_text() -> None:
    cuts = sentences(PIECES)
    assert cuts[0] == 0
    assert cuts[-1] == len(PIECES)
    assert "".join(PIECES[cuts[0] : cuts[1]]) == "The cat sat on a mat all day."
    assert "".join(PIECES[cuts[1] : cuts[2]]).strip() == "The grey dog ran to the old barn."
    assert max(b - a for a, b in zip(sentences([" word"] * 300), sentences([" word"] * 300)[1:], strict=False)) == 64


def test_the_passage_is_found_whose_words_the_answer_says_as_they_are_recalled() -> None:
    barn = PIECES.index(" barn.")
    everywhere = [PIECES.index(" end"), PIECES.index(" all")]  # recalled whatever is said
    step = [[*everywhere, barn], [*everywhere, barn], [*everywhere, -1]]
    (found,) = passages(recorded(step, step), PIECES, [" Barn", "!"])
    assert found.text.strip() == "The grey dog ran to the old barn."
    assert abs(found.share - 2 / 3) < 1e-6


def test_without_a_common_word_the_most_recalled_passage_is_found() -> None:
    fox = PIECES.index(" fox")
    (found,) = passages(recorded([[fox, fox + 1]], [[fox, -1]]), PIECES, [" zebra", " stripes"])
    assert found.text.strip() == "A fox slept in the wood."


def test_nothing_is_found_where_every_step_attended_to_everything() -> None:
    assert passages(Recording([{}, {}]), PIECES, [" cat", " dog"]) == []
