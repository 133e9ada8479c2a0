"""KL of all methods on a pretrained model: what is run in a bounded time, what a later run adds, and the tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvthaw.evaluate.agreement import Agreement, Comparison
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import read_variants
from lab import real_models

VARIANTS = read_variants("oracle,streaming", [64, 128])


def test_a_run_that_is_stopped_goes_on_and_prompts_that_all_have_count(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    prompts = real_models.prompts_of(loaded[1], read_asset("book.txt")[:4000], [200, 300], 1, 2)
    assert [one.follows is None for one in prompts] == [False, True, False, True]
    assert {len(one.tokens) for one in prompts} <= set(range(190, 301))
    work = Comparison(tuple(prompts), 2)

    def go(until: float) -> bool:
        results = real_models.Noted(path, "words", "abc")
        return real_models.measure(Agreement(*loaded, results, name="tiny", batch=2), work, VARIANTS, until)

    assert not go(time.monotonic())
    some = path.read_text().splitlines()
    assert len(some) == 2, "full attention's two prompts of the first block"
    assert go(time.monotonic() + 1000)
    every = path.read_text().splitlines()
    assert every[: len(some)] == some
    assert len(every) == 4 * (1 + len(VARIANTS))
    made = list(real_models.lines(map(Record.from_json, every)))
    assert {(one["method"], one["budget"], one["answer"], one["n"], one["commit"]) for one in made} == {
        (*of, kind, 2, "abc")
        for of in (("full", None), *((one.method, one.budget) for one in VARIANTS))
        for kind in ("greedy", "text")
    }
    cut = list(real_models.lines(map(Record.from_json, every[:-1])))
    assert sorted(one["n"] for one in cut) == [1] * (1 + len(VARIANTS)) + [2] * (1 + len(VARIANTS))
    text = real_models.tables(made)
    said = " ".join(text.split())
    assert "2 prompts followed by full attention's greedy answers (" in said
    assert "and 2 prompts followed by the text itself (4 tokens)" in said
    assert all(len(line) <= 132 for line in text.splitlines() if not line.startswith("|"))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["oracle", "streaming"]
    assert rows[0].count("|") == 3 + 2 * 2
    assert all(cell.endswith("%") and " to " in cell for cell in rows[0].strip("| ").split(" | ")[2:]), rows[0]
