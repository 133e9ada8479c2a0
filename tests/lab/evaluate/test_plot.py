"""What plots show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import FULL, Variant
from lab.evaluate import plot


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """All words of each panel that is drawn."""
    from matplotlib.text import Text

    panels: list[list[str]] = []

    def save(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        panels.extend([text.get_text() for text in axes.findobj(Text)] for axes in figure.axes)

    monkeypatch.setattr(plot, "save", save)
    return panels


def samples(right: int, *, at: float | None = 0.5) -> list[Record]:
    return [Record({"depth": 0.5 if i < 2 else 0.75}, {"accuracy": float(i < right), "at": at}) for i in range(4)]


QUEST = Variant("quest", 64, None, None)


def test_accuracy_at_one_length_is_bars_with_values_and_full_attention(texts: list[list[str]], tmp_path: Path) -> None:
    found: plot.Found = {(task, v, 512): samples(n) for task in ("a", "b") for v, n in ((QUEST, 1), (FULL, 3))}
    plot.accuracies(found, tmp_path / "a.png", title="both")
    assert len(texts) == 2
    for task, words in zip("ab", texts, strict=True):
        assert f"{task}, 512 tokens, n=4" in words
        assert {"full", "quest, budget 64", "25", "75"} <= set(words)


def test_accuracy_at_several_lengths_is_maps_with_values(texts: list[list[str]], tmp_path: Path) -> None:
    found: plot.Found = {("a", v, length): samples(n) for length in (512, 1024) for v, n in ((QUEST, 1), (FULL, 3))}
    plot.accuracies(found, tmp_path / "a.png", title="a")
    (quest, full) = texts
    assert {"quest, budget 64", "50 %", "75 %", "512", "1,024", "50", "0"} <= set(quest)
    assert {"full", "100", "50"} <= set(full)
    texts.clear()
    nowhere: plot.Found = {("a", FULL, length): samples(1, at=None) for length in (512, 1024)}
    plot.accuracies(nowhere, tmp_path / "a.png", title="a")
    assert {"all", "25"} <= set(texts[0])


def test_times_at_one_length_and_batch_are_bars(texts: list[list[str]], tmp_path: Path) -> None:
    def record(method: str, tpot: float) -> Record:
        asked = {"method": method, "steps": "eager", "length": 512, "batch": 1, "budget": None, "retrieved": None}
        return Record(asked, {"tpot_s": tpot, "tokens_per_s": 1 / tpot})

    plot.decode_lines([record("full", 0.0125), record("oracle", 0.02)], tmp_path / "a.png")
    assert len(texts) == 1
    assert {"full (eager)", "12.5", "oracle (eager)", "20"} <= set(texts[0])
