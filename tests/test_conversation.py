"""Conversations: each turn prefills only what is new, and answers as if everything had been prefilled again."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvthaw.answering import Answer
from kvthaw.conversation import Conversation, plain_template
from kvthaw.engine.chat_template import Chat
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import CacheError, ConfigError

SIX = Sampling(max_tokens=6)
MARKED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}[assistant]"
FORGETS = MARKED.replace("m['content']", "(m['content'][3:] if m['role'] == 'assistant' else m['content'])")
"""A template that leaves out a part of earlier answers, as those of models that think do."""
DOCUMENT = "The grass is green. The sky is blue. " * 8


def begin(loaded: tuple[Any, Any], method: str = "full", template: str = MARKED, **settings: Any) -> Conversation:
    model, tokenizer = loaded
    tokenizer.chat_template = template
    return Conversation(model, tokenizer, Cache(model, method, **settings), prefill_chunk=64)


def turn(talk: Conversation, question: str) -> str:
    talk.ask(question)
    return "".join(talk.stream(SIX))


def from_scratch(talk: Conversation, tokens: list[int]) -> str:
    """Return the answer of a cache that has never held anything else."""
    cache = Cache(talk.model, "full")
    return "".join(Answer(talk.model, talk.tokenizer, cache, prefill(talk.model, cache, tokens), sampling=SIX))


@pytest.mark.parametrize("method", ["full", "icecache-digest"])
def test_a_turn_prefills_what_is_new_and_answers_as_if_all_were(loaded: tuple[Any, Any], method: str) -> None:
    talk = begin(loaded, method, budget=None if method == "full" else 2000)
    talk.read(DOCUMENT)
    assert talk.prefilled == len("[user]" + DOCUMENT.rstrip())
    for question in ("Who?", "Why?", "When?"):
        before = talk.tokens
        answer = turn(talk, question)
        prompt = talk.tokens[: len(talk.tokens) - len(talk.answer.tokens)]  # type: ignore[union-attr]
        assert talk.tokens[: len(before)] == before, "the tokens that were generated"
        assert talk.prefilled <= len(f"[end][user] {question}[end][assistant]") + 1, "with the last token of an answer"
        assert answer == from_scratch(talk, prompt)


def test_a_document_that_goes_on_behind_a_kept_one_is_kept_too(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    prefilled = []
    for document in (DOCUMENT, DOCUMENT + "And then? ", DOCUMENT + "And then? "):
        talk = begin(loaded)
        talk.read(document, kept=tmp_path)
        prefilled.append(talk.prefilled)
    assert prefilled[0] > 256 > 64 > prefilled[1] > prefilled[2]


def test_a_template_that_changes_earlier_answers_costs_no_document(loaded: tuple[Any, Any]) -> None:
    talk = begin(loaded, template=FORGETS)
    talk.read(DOCUMENT)
    turn(talk, "Who?")
    answer = turn(talk, "Why?")
    assert talk.prefilled < 80
    rendered = Chat().turns(talk.tokenizer, talk.messages[:-1])
    assert answer == from_scratch(talk, list(talk.tokenizer(rendered, add_special_tokens=False)["input_ids"]))


@pytest.mark.parametrize("method", ["full", "icecache-digest", "streaming"])
def test_an_interrupted_prefill_leaves_the_conversation_as_it_was(loaded: tuple[Any, Any], method: str) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    settings = {} if method == "full" else {"budget": 64}
    calm, rough = begin(loaded, method, **settings), begin(loaded, method, **settings)
    answers = []
    for talk in (calm, rough):
        talk.read(DOCUMENT)
        turn(talk, "Who?")
        if talk is rough:
            held = talk.cache.get_seq_length()
            with pytest.raises(KeyboardInterrupt):
                talk.ask("What was it? " * 20, progress=interrupt)
            assert talk.cache.get_seq_length() <= held, "tokens that are not the conversation's would be saved with it"
        assert [one["role"] for one in talk.messages] == ["user", "assistant"]
        answers.append(turn(talk, "Why?"))
    assert answers[0] == answers[1]


def test_an_answer_that_was_interrupted_is_part_of_the_conversation(loaded: tuple[Any, Any]) -> None:
    talk = begin(loaded)
    talk.ask("Who?")
    pieces = talk.stream(SIX)
    said = [next(pieces) for _ in range(3)]
    pieces.close()
    assert talk.answer is not None
    assert talk.answer.finish == "interrupted"
    assert talk.messages[-1]["content"].startswith("".join(said))
    assert len(talk.answer.tokens) == 3
    assert turn(talk, "Why?") == from_scratch(talk, talk.tokens[: -len(talk.answer.tokens)])


def test_it_is_saved_and_taken_up(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    talk = begin(loaded, "oracle", budget=2000)
    talk.read(DOCUMENT)
    talk.save(tmp_path / "document")
    turn(talk, "Who?")
    talk.save(tmp_path / "talk")
    expected = turn(talk, "Why?")
    other = begin(loaded, "oracle", budget=2000)
    other.resume(tmp_path / "talk")
    assert turn(other, "Why?") == expected
    assert other.messages == talk.messages
    fresh = begin(loaded, "oracle", budget=2000)
    fresh.resume(tmp_path / "document")
    turn(fresh, "Who?")
    assert turn(fresh, "Why?") == expected
    fresh.clear()
    turn(fresh, "Who?")
    assert turn(fresh, "Why?") == expected
    with pytest.raises(ConfigError, match="system prompt"):
        begin(loaded, template="<<" + MARKED).resume(tmp_path / "document")
    with pytest.raises(CacheError, match="no saved cache"):
        other.resume(tmp_path / "nothing")


def test_a_conversation_that_is_taken_up_still_has_its_document(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    talk = begin(loaded)
    talk.read(DOCUMENT)
    document = talk.tokens
    expected = turn(talk, "Who?")
    talk.save(tmp_path / "talk")
    for place in ("talk", "again"):
        other = begin(loaded)
        other.resume(tmp_path / place)
        assert other.messages == talk.messages
        other.save(tmp_path / "again")
        other.clear()
        assert other.tokens == document
        assert turn(other, "Who?") == expected
        assert other.prefilled < 40


@pytest.mark.parametrize("said", ["%d %b %Y", "%B", "%A, %e"])
def test_what_was_kept_on_another_day_goes_on(loaded: tuple[Any, Any], tmp_path: Path, said: str) -> None:
    dated = f"Today is {{{{ strftime_now('{said}') }}}}. {MARKED}"
    talk = begin(loaded, template=dated)
    talk.dates = {said: datetime(2026, 2, 3).strftime(said)}
    talk.read(DOCUMENT, kept=tmp_path / "document")
    turn(talk, "Who?")
    talk.save(tmp_path / "talk")
    other = begin(loaded, template=dated)
    other.resume(tmp_path / "talk")
    turn(other, "Why?")
    assert other.prefilled < 40
    assert other.tokens[: len(talk.tokens)] == talk.tokens
    for again in (begin(loaded, template=dated), begin(loaded, template=dated)):
        again.read(DOCUMENT, kept=tmp_path / "document")
        assert again.prefilled == 1
    fresh = begin(loaded, template=dated)
    fresh.resume(tmp_path / "document")
    fresh.ask("Who?")
    assert fresh.prefilled < 40


def test_the_date_of_a_conversation_stays(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    talk = begin(loaded, template=f"Today is {{{{ strftime_now('%d %b %Y') }}}}. {MARKED}")
    turn(talk, "Who?")

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(1)

    monkeypatch.setattr("kvthaw.engine.chat_template.datetime", Tomorrow)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    turn(talk, "Why?")
    assert talk.prefilled < 40


def test_what_was_recalled(loaded: tuple[Any, Any]) -> None:
    talk = begin(loaded, "oracle", budget=64)
    talk.read(DOCUMENT)
    turn(talk, "Who?")
    passages = talk.recalled(3)
    assert len(passages) <= 3
    assert all(one.text == talk.tokenizer.decode(talk.tokens[one.start : one.stop]) for one in passages)
    assert all(0 < one.share <= 1 for one in passages)
    assert "The grass is green." in talk.page("title")
    dense = begin(loaded)
    turn(dense, "Who?")
    assert dense.recalled() == []
    with pytest.raises(ConfigError, match="nothing was recalled"):
        dense.page("title")


def test_a_model_without_a_template_goes_on_with_the_text(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": " two"},
        {"role": "user", "content": "Three"},
    ]
    tokenizer.chat_template = plain_template(tokenizer)
    assert Chat().turns(tokenizer, messages) == "One two\nThree"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv", "icecache-digest", "full"])
def test_turns_replay_graphs_on_a_gpu(folder: Path, method: str) -> None:
    loaded = load(str(folder), device="cuda", dtype="float32")
    talk = begin(loaded, method, budget=None if method == "full" else 2000)
    talk.read(DOCUMENT)
    for question in ("Who?", "Why?"):
        answer = turn(talk, question)
        assert answer == from_scratch(talk, talk.tokens[: len(talk.tokens) - len(talk.answer.tokens)])  # type: ignore[union-attr]
    assert talk.cache.stats().captures > 0
    if method != "full":
        sparse = begin(loaded, method, budget=64)
        sparse.read(DOCUMENT)
        turn(sparse, "Who?")
        assert all(sparse.recording.selected[1:]), "captured steps are observed"
