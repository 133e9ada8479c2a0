"""Prompts through a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvthaw.engine.chat_template import Chat, split_prompt
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import FULL
from lab.evaluate.answers import spoken
from lab.evaluate.job import THINKING, Job
from lab.evaluate.runner import Runner
from lab.evaluate.tasks import TASKS

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[bot]"
THINKS = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
MUTE = "{{ messages[-1]['content'] }}[bot]"
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + MUTE


@pytest.fixture
def template(loaded: tuple[Any, Any]) -> Iterator[Any]:
    """Sets the tokenizer's chat template."""
    tokenizer = loaded[1]
    yield lambda text: setattr(tokenizer, "chat_template", text)
    tokenizer.chat_template = None


def test_system_prompt_and_thinking_reach_the_template(loaded: tuple[Any, Any], template: Any) -> None:
    template(THINKS)
    chat = Chat("Be brief.", thinking=False)
    chat.check(loaded[1])
    context, question = split_prompt(loaded[1], "one ", "two", chat)
    assert loaded[1].decode(context) == "[system]Be brief.[user]one "
    assert loaded[1].decode(question) == "two[bot]<think></think>"


@pytest.mark.parametrize(
    ("text", "chat", "words"),
    [
        (None, Chat(), "has no chat template"),
        (PLAIN, Chat(thinking=True), "thinking is to be on, but the chat template does not know"),
        (MUTE, Chat("Be brief."), "leaves the system prompt out"),
        (STRICT, Chat("Be brief."), "the chat template refuses the messages: no system role"),
    ],
)
def test_what_a_template_does_not_know_is_refused(
    loaded: tuple[Any, Any], template: Any, text: str | None, chat: Chat, words: str
) -> None:
    template(text)
    with pytest.raises(ConfigError, match=words):
        Runner(*loaded).run(Job("passkey", 300, 1, chat=chat), [])


def test_a_task_is_asked_through_the_template(loaded: tuple[Any, Any], template: Any) -> None:
    template(THINKS)
    runner = Runner(*loaded)
    plain, asked, thinks = (
        runner.run(Job("passkey", 300, 1, chat=chat, max_new_tokens=most), [])[FULL][0]
        for chat, most in ((None, None), (Chat(), None), (Chat(thinking=True), 20))
    )
    assert plain["prompt"] == 300
    assert asked["prompt"] == thinks["prompt"] == 300 + len("[user][bot]")
    assert not {"chat", "max_new_tokens"} & set(plain.setting)
    assert asked.setting["max_new_tokens"] == Job("passkey", 300, 1, chat=Chat()).limit(TASKS["passkey"])
    assert thinks.setting["thinking"] is True
    assert asked["new_tokens"] != thinks["new_tokens"] == 20
    assert Job("passkey", 300, 1, chat=Chat(thinking=True)).limit(TASKS["passkey"]) == THINKING


@pytest.mark.parametrize(
    ("text", "said"),
    [("a\nb", "a"), ("\na\nb", "\na"), ("<think>7\n</think>\n\n42\nmore", "42"), ("7\n</think> 42", "42"), ("", "")],
)
def test_what_counts_is_said_after_thinking(text: str, said: str) -> None:
    assert spoken(text, ("\n",)) == said
