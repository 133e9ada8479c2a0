"""kvthaw demo."""

from __future__ import annotations

import random

import pytest
from said import Said


def test_demo_answers_from_one_prefill(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.evaluate.tasks.niah.QUESTION_ONE", "\n{one} {query}?")  # a token is a byte here
    record = Said("demo", "--model", model, "--method", "oracle", "--budget", "64", "--length", "1400", "--json").records[0]
    assert 1300 < record["prompt_tokens"] <= 1400
    assert len(record["questions"]) == len(record["thawed"]["answers"]) == len(record["full"]["answers"]) == 5
    assert record["thawed"]["sparse_steps"] > 0 == record["full"]["sparse_steps"]
    assert record["thawed"]["attended_max"] <= 64
    assert record["thawed"]["kv_device_bytes"] < record["full"]["kv_device_bytes"] / 10


def test_a_number_inside_a_longer_one_is_no_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvthaw.demo

    facts = [kvthaw.demo.Question(f"Fact {i} is 6088743.", f"\nWhat is fact {i}?", "6088743", 4, 0.0) for i in range(5)]
    monkeypatch.setattr(kvthaw.demo, "facts", lambda rng: facts)
    monkeypatch.setattr(kvthaw.demo.Answers, "texts", property(lambda self: [" 46088743."]))
    arguments = ("demo", "--model", model, "--method", "streaming", "--budget", "64", "--length", "900")
    record = Said(*arguments, "--json").records[0]
    assert record["thawed"]["right"] == record["full"]["right"] == [False] * 5
    said = Said(*arguments)
    assert said.code == 0
    assert (said.out.count("right"), said.out.count("wrong")) == (1, 10)  # once on the card
    assert "What is fact 3?" in said.out
    assert "attention mass covered" in said.out


@pytest.mark.model
def test_demo_on_the_shipped_model_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass key and two values, whose answers are short."""
    import kvthaw.demo

    facts = [fact for fact in kvthaw.demo.facts(random.Random(0)) if fact.limit < 48][:3]
    monkeypatch.setattr(kvthaw.demo, "facts", lambda rng: facts)
    monkeypatch.setattr(kvthaw.demo, "DEPTHS", kvthaw.demo.DEPTHS[:3])
    record = Said("demo", "--length", "600", "--json").records[0]
    assert record["full"]["right"] == [True] * 3
    assert record["thawed"]["right"] == [True] * 3
    assert record["thawed"]["attended_max"] <= 256
