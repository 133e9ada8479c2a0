"""Perplexity by position: the numbers of plain transformers, methods under their budget, resuming, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvthaw.errors import ConfigError
from kvthaw.evaluate.evaluator import Progress
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.evaluate.variant import FULL, Variant
from lab.evaluate import perplexity
from lab.evaluate.perplexity import Course, Reader, summarize

WIDE, NARROW = Variant("oracle", 1000), Variant("streaming", 64)
COURSES = [Course(150, steps=12), Course(400, steps=12)]


def read(reader: Reader, courses: list[Course], variants: list[Variant], **how: Any) -> dict[Variant, list[dict[str, Any]]]:
    """Return the summaries of every variant by length."""
    found: dict[Variant, list[dict[str, Any]]] = {}
    for course in courses:
        records = reader.run(course, variants, **how)
        for variant, some in records.items():
            found.setdefault(variant, []).append(summarize(some, records[FULL]))
    return found


def count_forwards(model: Any) -> list[tuple[int, int]]:
    """Rows and tokens of every forward from now on."""
    seen: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


def test_full_is_what_transformers_says_and_a_budget_that_covers_all_is_full(loaded: tuple[Any, Any], folder: Path) -> None:
    found = read(Reader(*loaded), COURSES, [WIDE, NARROW])
    tokenizer = loaded[1]
    ids = tokenizer(read_asset("book.txt")[:600], return_tensors="pt")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = torch.log_softmax(plain(ids).logits[0].float(), -1)
    for row in found[FULL]:
        expected = [-float(scores[at, ids[0, at + 1]]) for at in range(row["length"], row["length"] + 12)]
        assert row["nll"] == pytest.approx(sum(expected) / 12, abs=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        assert (row["difference"], row["attended_mean"]) == (0.0, None)
    for wide, narrow, full in zip(found[WIDE], found[NARROW], found[FULL], strict=True):
        assert wide["nll"] == pytest.approx(full["nll"], abs=1e-4)
        assert abs(narrow["difference"]) > 1e-3
        assert narrow["difference"] == pytest.approx(narrow["nll"] - narrow["full_nll"])
        assert narrow["attended_max"] is not None
        assert narrow["attended_max"] <= 64
        assert narrow["difference_95"][0] < narrow["difference"] < narrow["difference_95"][1]
    assert [row["length"] for row in found[NARROW]] == [150, 400]


def test_places_are_drawn_by_the_seed(loaded: tuple[Any, Any]) -> None:
    lines = ResultsFile()
    reader = Reader(*loaded, lines)
    course = Course(100, steps=12, samples=3)
    assert [one["seed"] for one in reader.run(course, [])[FULL]] == [0, 1, 2]
    starts = [line.setting["start"] for line in lines]
    assert starts[0] == 0
    assert len(set(starts)) == 3
    alone = reader.run(replace(course, seed=2, samples=1), [])[FULL]
    assert alone == [list(lines)[2]]
    assert len(list(lines)) == 3, "what is known is not read again"


def test_a_row_of_a_batch_gives_the_line_of_the_sample_alone(loaded: tuple[Any, Any]) -> None:
    loaded[0].double()  # rounding, which depends on the rows beside, decides nothing
    courses = [Course(length, steps=5, samples=3) for length in (150, 200)]
    variants = [WIDE, NARROW, Variant("quest", 64), Variant("h2o", 64, dense_layers=1)]
    alone, together = ResultsFile(), ResultsFile()
    expected = read(Reader(*loaded, alone, batch=1), courses, variants)
    read(Reader(*loaded, together, batch=3), [replace(one, samples=1, seed=1) for one in courses], [NARROW])
    seen = count_forwards(loaded[0])
    found = read(Reader(*loaded, together, batch=3), courses, variants)
    # the second sample lacks two variants less than the others, so two caches of two rows and one take their steps
    assert sorted(set(seen)) == [(1, 1), (1, 150), (1, 200), (2, 1)]
    assert seen.count((2, 1)) == 2 * 5 * 5
    assert seen.count((1, 1)) == 2 * 3 * 5
    assert (seen.count((1, 150)), seen.count((1, 200))) == (3, 3), "one prefill a sample and length"
    assert len(list(together)) == len(list(alone)) == 3 * 2 * 5
    for line in alone:
        row = together.get(line.setting)
        assert row is not None
        assert row["nll"] == pytest.approx(line["nll"], abs=1e-4)
        assert {**row.measures, "nll": (), "seconds": 0.0} == {**line.measures, "nll": (), "seconds": 0.0}
    for variant, summaries in expected.items():
        assert [one["n"] for one in found[variant]] == [3, 3]
        assert [one["nll"] for one in found[variant]] == pytest.approx([one["nll"] for one in summaries], abs=1e-4)


def test_pieces_of_a_course_are_rows_that_lack_the_same(loaded: tuple[Any, Any]) -> None:
    course, wanted = Course(150, steps=6, samples=5), [FULL, Variant("oracle", 64, dense_layers=0)]
    reader = Reader(*loaded, batch=2)
    pieces = reader.missing(course, wanted)
    assert [(one.places, one.variants) for one in pieces] == [(seeds, tuple(wanted)) for seeds in ((0,), (1, 2), (3, 4))]
    for records in reader.compute(pieces[1]):
        reader.results.add(*records)
    assert [one.places for one in reader.missing(course, wanted)] == [(0,), (3, 4)]


def test_a_text_is_tokenised_once_however_many_settings_ask(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A book takes a fifth of a second, and the whole table asks some four thousand times."""
    asked: list[str | None] = []
    real = perplexity.tokens_of
    monkeypatch.setattr(perplexity, "tokens_of", lambda tokenizer, text: (asked.append(text), real(tokenizer, text))[1])
    reader = Reader(*loaded)
    text = read_asset("book.txt")[:4000]
    for each in (None, text):
        pieces = reader.missing(Course(150, steps=6, samples=3, text=each), [FULL, NARROW])
        assert len(list(reader.compute(pieces[0]))) == 2
    assert asked == [None, text]


def test_a_run_continues_where_it_stopped(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    out = tmp_path / "ppl.jsonl"
    seen: list[Progress] = []
    first = read(Reader(*loaded, ResultsFile(out)), COURSES[1:], [NARROW], progress=seen.append)
    written = out.read_text()
    assert len(written.splitlines()) == 2
    assert all(len(json.loads(line)["nll"]) == 12 for line in written.splitlines())
    assert [state.samples for state in seen] == sorted(state.samples for state in seen)
    assert (seen[-1].samples, seen[-1].of) == (1, 1)
    out.write_text("".join(written.splitlines(keepends=True)[:1]))
    again = read(Reader(*loaded, ResultsFile(out)), COURSES[1:], [NARROW])
    for variant, rows in first.items():
        assert [row["nll"] for row in again[variant]] == pytest.approx([row["nll"] for row in rows], abs=1e-5)
    assert len(out.read_text().splitlines()) == 2


def test_the_interval_is_of_all_paired_tokens(loaded: tuple[Any, Any]) -> None:
    lines = ResultsFile()
    Reader(*loaded, lines).run(Course(100, steps=3), [])
    (full,) = lines
    full, other = (Record(full.setting, {**full.measures, "nll": nll}) for nll in ([1.0, 2.0, 3.0], [1.5, 2.0, 4.0]))
    row = summarize([other], [full])
    assert (row["nll"], row["difference"]) == (2.5, 0.5)
    assert row["difference_95"] == pytest.approx((0.5 - 1.96 * 0.5 / 3**0.5, 0.5 + 1.96 * 0.5 / 3**0.5))


def test_what_is_refused(loaded: tuple[Any, Any]) -> None:
    for settings, problem in (
        ({"length": 0}, "length is 0; it must be at least 1"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"samples": 0}, "samples is 0"),
        ({"seed": -1}, "seed is -1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            replace(COURSES[0], **settings)  # type: ignore[arg-type]
    reader = Reader(*loaded)
    with pytest.raises(ConfigError, match="the text has 40 tokens; length and steps take 413 tokens"):
        reader.run(replace(COURSES[1], text="x" * 40), [])
    with pytest.raises(ConfigError, match=r"3,012 tokens; the model's positions end at 2,048"):
        reader.run(replace(COURSES[1], length=3000), [])
    with pytest.raises(ConfigError, match="budget"):
        reader.run(COURSES[0], [Variant("icecache-digest", 2)])
