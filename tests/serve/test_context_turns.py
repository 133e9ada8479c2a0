"""Conversations that go on from what is kept under a name: a text or messages, whatever day it is."""

from __future__ import annotations

import asyncio
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from servers import Served, serving

from kvthaw import Cache
from kvthaw.conversation import Conversation
from kvthaw.engine.chat_template import Chat
from kvthaw.serve.build import build
from kvthaw.serve.lanes import Reader
from kvthaw.serve.schema import ChatRequest, CompletionRequest, Message
from kvthaw.serve.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOCUMENT = "Once upon a time a king had three sons. " * 16
DATED = (
    "Today is {{ strftime_now('%d %b %Y') }}.\n{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (  # as those that take turns alone
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def asked_of(server: Served, context: str, *questions: str, **how: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": question} for i, question in enumerate(questions)]
    said = server.post("/v1/chat/completions", messages=messages, context=context, max_tokens=4, temperature=0, **how)
    assert said.status_code == 200, said.text
    answer: dict[str, Any] = said.json()
    return answer


@pytest.mark.parametrize("template", [STRICT, DATED])
def test_a_conversation_is_about_a_text_that_is_kept(loaded: tuple[PreTrainedModel, Any], template: str) -> None:
    with serving(*loaded, chat_template=template, method="full") as server:
        server.post("/v1/contexts", name="book", text=DOCUMENT)
        said = asked_of(server, "book", "Who?", "He.", "Why?")
        messages = [
            {"role": "user", "content": f"{DOCUMENT}\nWho?"},
            {"role": "assistant", "content": "He."},
            {"role": "user", "content": "Why?"},
        ]
        plain = server.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0).json()
        assert said["choices"] == plain["choices"]
        said = server.post("/v1/responses", input="Who?", context="book", max_output_tokens=2)
        assert said.status_code == 200


@pytest.mark.parametrize("template", [STRICT, DATED])
def test_a_document_is_kept_for_conversations(loaded: tuple[PreTrainedModel, Any], template: str) -> None:
    """Its KV serves a conversation about it, which a bare text's does not."""
    with serving(*loaded, chat_template=template, method="full", budget=None) as server:
        cached, choices = [], []
        for field in ("text", "document"):
            kept = server.post("/v1/contexts", name=field, cache_salt=field, **{field: DOCUMENT})
            assert (kept.status_code, kept.json()["messages"]) == (200, False), kept.text
            said = asked_of(server, field, "Who was the king, and what did he tell his sons? " * 4, cache_salt=field)
            cached.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
            choices.append(said["choices"][0]["message"])
        assert choices[0] == choices[1]
        assert cached[0] == 0
        assert cached[1] > 0.8 * len(DOCUMENT)
        refused = server.post("/v1/contexts", name="a", text="b", document="c")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")


@pytest.mark.parametrize("template", [STRICT, DATED])
def test_a_text_is_kept_for_conversations_at_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """And its tokens are gone on from on any other day, also when they come from a folder; texts follow the bare document."""
    folders = set[int]()
    for day in (1, 2):
        _it_is(day, monkeypatch)
        how: dict[str, Any] = {"max_seqs": 2, "kv_dir": tmp_path, "chat_template": template}
        service = build(str(folder), "full", contexts={"book": DOCUMENT}, **how)
        kept = service.documents.kept()["book"]
        who = [Message(role="user", content="Who?")]
        ids = asyncio.run(service.encode_chat(who, ChatRequest(messages=who, context="book")))
        assert ids[: len(kept.ids)] == kept.ids.tolist()
        assert service.tokenizer.decode(ids[len(kept.ids) :]) == "\nWho?[end][assistant]"
        bare = asyncio.run(service.context_tokens(CompletionRequest(prompt="x", context="book")))
        assert service.tokenizer.decode(bare) == DOCUMENT
        folders.add((tmp_path / "book").stat().st_ino)
    assert len(folders) == 1, "it is prefilled on the first day alone"


def test_a_text_that_is_another_is_read_again_at_the_start(folder: Path, tmp_path: Path) -> None:
    for text, template in ((DOCUMENT, STRICT), (DOCUMENT.upper(), STRICT), (DOCUMENT.upper(), f"Hello.{STRICT}")):
        service = build(str(folder), "full", max_seqs=2, kv_dir=tmp_path, contexts={"book": text}, chat_template=template)
        said = service.tokenizer.decode(service.documents.kept()["book"].ids)
        assert text.strip() in said
        assert said.startswith("Hello.") == template.startswith("Hello.")


def test_messages_are_gone_on_from_on_another_day(loaded: tuple[PreTrainedModel, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(*loaded, chat_template=DATED, method="full") as server:
        system = {"role": "system", "content": "Be brief."}
        talk = [system, {"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": "Yes."}]
        for day in (1, 2):
            _it_is(day, monkeypatch)
            if day == 1:
                server.post("/v1/contexts", name="talk", messages=talk)
            usage = asked_of(server, "talk", f"Question {day}")["usage"]
            assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 200


def test_messages_that_are_kept_in_part_are_completed(loaded: tuple[PreTrainedModel, Any]) -> None:
    """As those of a conversation in the terminal are, whose cache lacks the end of the last answer."""
    _, tokenizer = loaded
    turns = Turns(tokenizer, DATED)

    def read(text: str, *_: Any) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    before = [Message(role="user", content="Who?"), Message(role="assistant", content="The king.")]
    new = [Message(role="user", content="Why?")]
    for cut in ("[end]", "g.[end]", ""):
        kept = read(turns._render(before, {"%d %b %Y": "01 Jan 2020"}, answer=False).removesuffix(cut))
        ids = turns.after_messages(read, kept, before, new)
        assert ids[: len(kept)] == kept
        assert tokenizer.decode(ids).endswith(
            "01 Jan 2020.\n[user]Who?[end][assistant]The king.[end][user]Why?[end][assistant]"
        )


def test_a_text_too_long_for_the_server_is_refused_behind_a_context(loaded: tuple[PreTrainedModel, Any]) -> None:
    with serving(*loaded, chat_template=STRICT, method="full") as server:
        server.post("/v1/contexts", name="book", text=DOCUMENT)
        long = [{"role": "user", "content": "x" * 100_000}]
        said = server.post("/v1/chat/completions", messages=long, context="book", max_tokens=1)
        assert (said.status_code, said.json()["error"]["code"]) == (400, "context_length_exceeded")


def _it_is(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.engine.chat_template.datetime", day_of(day))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", day_of(day))


def day_of(day: int) -> type[datetime]:
    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 3, day, tzinfo=tz)

    return Then


def test_a_document_that_a_conversation_kept_is_served(loaded: tuple[PreTrainedModel, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = DATED
    for system in (None, "Be brief."):
        talk = Conversation(model, tokenizer, Cache(model, "full"), Chat(system))
        talk.read(DOCUMENT, kept=tmp_path / "kv" / ("plain" if system is None else "brief"))
    with serving(model, tokenizer, method="full", kv_dir=tmp_path / "kv") as server:
        for name in ("plain", "brief"):
            kept, read = server.service.documents.kept()[name], partial(Reader(tokenizer, 512).tokens, param="messages")
            ids = server.service.turns.after_document(
                read, kept.ids.tolist(), kept.about, [Message(role="user", content="Who?")]
            )
            assert tokenizer.decode(ids).endswith(f".\n[user]{DOCUMENT.strip()}\nWho?[end][assistant]")
            assert (ids[: len(kept.ids)] == kept.ids.tolist()) == (name == "plain"), "the other one has another beginning"
        said = server.post("/v1/completions", prompt="So", context="brief", max_tokens=1, echo=True).json()
        assert said["choices"][0]["text"].startswith(f"{DOCUMENT}So")
