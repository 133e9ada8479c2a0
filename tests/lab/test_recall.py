"""Watching selections: passages, one prefill for all, bins, pooling, and files that a later run continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw.engine.hf.model import load_shipped
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.results import ResultsFile
from kvthaw.evaluate.variant import Variant
from kvthaw.methods import resolve
from lab.evaluate.probe import Quality
from lab.passages import PASSAGES, Passage, needle_passage, text_passage
from lab.recall import Study, run, summarize, with_shares

PARIS = Variant("pariskv:window=16:buffer=16", retrieved=10)
QUEST = Variant("quest", 64)
TEXT = read_asset("book.txt")[:5000]


def watched(
    loaded: tuple[Any, Any], study: Study, *variants: Variant, known: ResultsFile | None = None
) -> list[dict[str, Any]]:
    return run(*loaded, ResultsFile() if known is None else known, study, variants)


def count_forwards(model: Any) -> list[int]:
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return seen


# Passages


def test_a_text_goes_on_and_begins_anew(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    text = "abcdefghij" * 3 + "z"
    passage = text_passage(tokenizer, length=40, steps=5, seed=0, text=text)
    assert (len(passage.prompt), len(passage.rest)) == (40, 5)
    assert tokenizer.decode(passage.prompt + passage.rest) == (text * 2)[:45]
    other = text_passage(tokenizer, length=40, steps=5, seed=1, text=text)
    assert other == text_passage(tokenizer, length=40, steps=5, seed=1, text=text) != passage
    with pytest.raises(ConfigError, match="no tokens"):
        text_passage(tokenizer, length=40, steps=5, seed=0, text="")


def test_a_needle_is_asked_for_and_answered(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    passage = needle_passage(tokenizer, length=1200, steps=20, seed=3)
    assert len(passage.rest) == 20
    value = tokenizer.decode(passage.rest).split()[-1].rstrip(".")
    assert value.isdigit()
    assert value in tokenizer.decode(passage.prompt)
    whole = needle_passage(tokenizer, length=1200, steps=5000, seed=3)
    assert tokenizer.decode(whole.rest).strip().startswith("What is the special magic number")
    assert whole.prompt + whole.rest == passage.prompt + passage.rest
    with pytest.raises(ConfigError, match="length 10 is too short"):
        needle_passage(tokenizer, length=10, steps=20, seed=3)


def test_special_tokens_open_a_prompt_once() -> None:
    _, tokenizer = load_shipped()
    passage = text_passage(tokenizer, length=64, steps=8, seed=2)
    assert passage.prompt[0] == 0
    assert 0 not in passage.prompt[1:] + passage.rest
    assert (len(passage.prompt), len(passage.rest)) == (64, 8)


# Watching


def test_what_full_attention_writes_is_sent_to_all(loaded: tuple[Any, Any]) -> None:
    sent: list[int] = []
    loaded[0].register_forward_pre_hook(
        lambda module, args, kwargs: sent.extend(kwargs["input_ids"][0].tolist() if kwargs["input_ids"].shape[1] == 1 else []),
        with_kwargs=True,
    )
    watched(loaded, Study(200, 6, ("text",), follow="full", temperature=0.0, text=TEXT), QUEST, PARIS)
    written, quest, paris = sent[:5], sent[5:11], sent[11:]  # its last token is sent nowhere
    assert quest == paris
    assert quest[:5] == written
    prompt = torch.tensor([text_passage(loaded[1], length=200, steps=1, seed=0, text=TEXT).prompt])
    found = loaded[0].generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert found[0, 200:].tolist() == quest


def test_one_prefill_serves_all_methods_and_the_text_is_followed(loaded: tuple[Any, Any]) -> None:
    seen = count_forwards(loaded[0])
    first, second = watched(loaded, Study(700, 4, samples=2, text=TEXT), Variant("oracle", budget=1000), PARIS)
    assert next(n for n in seen if n > 1) == 700
    assert len([n for n in seen if n > 1]) == 4
    assert len([n for n in seen if n == 1]) == 4 * 2 * 4
    assert first["attention_mass"] == pytest.approx(1, abs=1e-5)
    assert first["output_error"] == pytest.approx(0, abs=1e-4)
    assert (second["observed"], second["rows"]) == (4 * 4 * 2, 10)
    assert second["recall_at_rows"] <= second["ceiling"]
    assert [part["layer"] for part in second["layers"]] == [0, 1]
    for name in ("recall_at_rows", "attention_mass", "output_error", "exact_mass"):
        for parts in (second["layers"], [*second["kinds"].values()], second["bins"]):
            assert second[name] == pytest.approx(sum(part[name] for part in parts) / len(parts), abs=2e-6)


@pytest.mark.parametrize("name", ["oracle", "streaming", "icecache", "pariskv", "magicpig", "retroinfer"])
def test_every_method_can_be_watched(loaded: tuple[Any, Any], name: str) -> None:
    (summary,) = watched(loaded, Study(300, 4, ("text",), text=TEXT), Variant(name, 64))
    assert 0 < summary["attention_mass"] <= 1 + 1e-5
    json.dumps(summary)
    if resolve(name).index is not None:
        assert summary["mass_of_exact"] > 0


def test_bins_are_those_of_the_steps(loaded: tuple[Any, Any]) -> None:
    study = Study(200, 40, ("text",), probe=2, text=TEXT)
    assert study.bins == 20
    assert Study(200, 4096, ("text",), probe=16).bins == 32
    assert Study(200, 7, ("text",)).bins == 4
    (summary,) = watched(loaded, study, PARIS)
    assert [part["observed"] for part in summary["bins"]] == [2] * 20
    assert [part["observed"] for part in summary["quarters"]] == [10] * 4
    assert [(part["first"], part["stop"]) for part in summary["bins"][:3]] == [(0, 2), (2, 4), (4, 6)]
    assert summary["bins"][-1]["stop"] == 40
    assert summary["recall_at_10"] == summary["recall_at_rows"]


def test_a_run_continues_where_the_file_ends(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path, study = tmp_path / "out.jsonl", Study(700, 4, text=TEXT)
    first = watched(loaded, study, PARIS, known=ResultsFile(path))
    assert len(path.read_text().splitlines()) == 2
    seen = count_forwards(loaded[0])
    assert watched(loaded, study, PARIS, known=ResultsFile(path)) == first
    assert seen == []
    path.write_text(path.read_text()[:-40])  # stopped while writing
    both = watched(loaded, study, PARIS, QUEST, known=ResultsFile(path))
    assert len(path.read_text().splitlines()) == 4
    assert both[0]["recall_at_k"] == pytest.approx(first[0]["recall_at_k"])
    (fewer,) = watched(loaded, Study(700, 4, probe=2, text=TEXT), PARIS, known=ResultsFile(path))
    assert fewer["observed"] < first[0]["observed"]


def test_the_text_is_part_of_the_setting(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for text in (None, "The quick brown fox. ", "The quick brown fox. "):
        watched(loaded, Study(100, 2, ("text",), text=text), PARIS, known=ResultsFile(path))
    assert len(path.read_text().splitlines()) == 2


def test_summary_of_lines_is_weighted(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: Any, **more: Any) -> Passage:
        passage = needle_passage(*given, **more)
        return replace(passage, rest=passage.rest[:7])

    monkeypatch.setitem(PASSAGES, "needle", short)
    known, study = ResultsFile(), Study(700, 12, probe=3, text=TEXT)
    (found,) = watched(loaded, study, QUEST, known=known)
    lines = list(known)
    assert [line["steps"] for line in lines] == [12, 7]
    assert found["observed"] == 2 * (4 + 3)
    assert summarize(study, lines[:1])["kinds"]["needle"]["observed"] == 0


def test_bad_studies_are_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="length is 0"):
        Study(0, 4)
    with pytest.raises(ConfigError, match="prompt is 'poem'; it must be one of text, needle"):
        Study(100, 4, ("poem",))
    with pytest.raises(ConfigError, match="follow is 'you'"):
        Study(100, 4, follow="you")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompts of text alone"):
        Study(100, 4, follow="full")
    with pytest.raises(ConfigError, match="probe is 5"):
        Study(100, 4, probe=5)
    with pytest.raises(ConfigError, match="'full'; it attends to everything"):
        watched(loaded, Study(100, 4), Variant("full"))
    with pytest.raises(ConfigError, match="dense_layers is 2; that leaves no layer to quest"):
        watched(loaded, Study(100, 4), Variant("quest", 64, dense_layers=2))
    with pytest.raises(ConfigError, match="2,104 tokens; the model's positions end at 2,048"):
        watched(loaded, Study(2100, 4, ("text",)), PARIS)


def test_shares_leave_out_what_is_always_attended_to() -> None:
    whole = Quality(0.8, 0.5, 0.1, 4, held_mass=0.4, exact_mass=0.9, ceiling_mass=0.85)
    found = with_shares(whole)
    assert found["mass_of_exact"] == pytest.approx(0.8 / 0.9)
    assert found["retrieved_of_exact"] == pytest.approx(0.4 / 0.5)
    assert found["ceiling_of_exact"] == pytest.approx(0.85 / 0.9)
    assert with_shares(Quality.of([]))["mass_of_exact"] is None
