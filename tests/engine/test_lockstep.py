"""Other processes of a split model compile grammars beside their steps, from when the first one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import bytemodel
from kvthaw import Batch, Sampling, Scheduler
from kvthaw.engine.grammar import ComingGrammars, Grammar, Grammars, Source
from kvthaw.engine.lockstep import Change, Compile, Lockstep, Submit, read, write
from kvthaw.engine.tool_calls import ANY_OBJECT

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")


class Scripted(Lockstep):
    """What a process is told whose first one is a script."""

    def __init__(self, told: Iterator[Sequence[Change] | None]) -> None:
        super().__init__()
        self.told = told

    def receive(self) -> Sequence[Change] | None:
        return read(write(next(self.told)))


def test_no_step_waits_for_a_grammar(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    batch = Batch(model, "full", max_seqs=2, capacity=bytemodel.POSITIONS)
    other = batch.request(tokenizer("Hi")["input_ids"], max_new_tokens=60, stop=())
    grammars = Grammars(tokenizer, batch.vocabulary)
    grammar = grammars.compile(grammars.read(ANY_OBJECT)[0])
    guided = batch.request(tokenizer("Hi")["input_ids"], sampling=Sampling(grammar=grammar), max_new_tokens=6)
    compile, goes_on, waited = Grammars.compile, threading.Event(), list[int]()

    def slow(self: Grammars, source: Source) -> Grammar:
        assert goes_on.wait(20)
        return compile(self, source)

    monkeypatch.setattr(Grammars, "compile", slow)
    given = list[Any]()
    scheduler = Scheduler(batch)
    submit = scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda *asked, **how: given.append(submit(*asked, **how)) or given[-1])

    def told() -> Iterator[Sequence[Change] | None]:
        yield [Submit.of(0, other, 0)]
        yield [Compile(grammar.source)]
        for _ in range(5):
            yield []
        waited.append(len(given[0].tokens))
        goes_on.set()
        yield [Submit.of(1, guided, 0)]
        while scheduler.busy:
            yield []
        yield None

    Scripted(told()).follow(scheduler, tokenizer)
    assert waited[0] >= 5, "steps went on meanwhile"
    assert [one.finished is not None for one in given] == [True, True]
    assert tokenizer.decode(given[1].tokens).startswith("{")


def test_a_grammar_is_compiled_once_and_one_that_nobody_announced_is_there_too(loaded: tuple[Any, Any]) -> None:
    grammars = Grammars(loaded[1], len(loaded[1]))
    one, other = (grammars.read(schema)[0] for schema in (ANY_OBJECT, {"type": "array", "items": {"type": "integer"}}))
    coming = ComingGrammars(lambda: grammars)
    coming.begin(one)
    coming.begin(one)
    assert coming.get(one) is coming.get(one)
    assert coming.get(other).source == other
    assert coming.get(one).source == one
