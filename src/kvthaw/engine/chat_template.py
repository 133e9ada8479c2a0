"""Render messages with a tokenizer's chat template, and divide prompts that ask through it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from kvthaw.engine.text import common, decode, encode
from kvthaw.errors import ConfigError

_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.+?)(?P=quote)\s*\)""")  # how templates ask for the date

_MARKS = 0xE000  # the first placeholder character for dates
Draw = Callable[[str, Mapping[str, str]], str]
"""Renders a conversation with this first user message, and dates by format; see `render`."""


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a default chat template."""
    found = getattr(tokenizer, "chat_template", None)
    return "default" in found if isinstance(found, dict) else bool(found)


def dates_of(tokenizer: Any, template: str | None = None) -> dict[str, str]:
    """Return the dates and times that a template, or else the tokenizer's, would print now, by format."""
    now = datetime.now()
    return {call["format"]: now.strftime(call["format"]) for call in _CLOCK.finditer(template_of(tokenizer, template))}


def dates_in(text: str, head: str, dates: Mapping[str, str]) -> dict[str, str] | None:
    """Return the dates in a text that begins with `head`, by format; None if it does not.

    dates: placeholder characters for dates in the head, by format.
    """
    pattern = re.escape(head)
    for i, mark in enumerate(dates.values()):
        before, at, behind = pattern.partition(re.escape(mark))
        pattern = f"{before}(?P<d{i}>.{{1,64}}?){behind.replace(at, f'(?P=d{i})')}" if at else pattern
    found = re.match(pattern, text, re.DOTALL)
    return None if found is None else {each: found.groupdict().get(f"d{i}", dates[each]) for i, each in enumerate(dates)}


def opening(draw: Draw, dates: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the text that all conversations begin with, up to the first user message."""
    one, other = draw("a", dates), draw("b", dates)
    return one[: common(one, other)]


def dates_said(text: str, draw: Draw, today: Mapping[str, str]) -> dict[str, str] | None:
    """Return the dates in a conversation's text, by format; None if it begins differently.

    today: as dates_of() returns them.
    """
    marks = {each: chr(_MARKS + i) for i, each in enumerate(today)}
    found = dates_in(text, opening(draw, marks), marks)
    return None if found is None else {each: said if said != marks[each] else today[each] for each, said in found.items()}


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    *,
    dates: Mapping[str, str] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
    **how: bool,
) -> str:
    """Return the text of messages.

    Raises ConfigError if there is no template, or if the template refuses the messages or fails.

    template: replaces the tokenizer's; see `template_of`.
    tools: functions that the model may call, as OpenAI's API names them.
    dates: dates to print instead of today's, by format.
    how: further arguments of `apply_chat_template`.
    """
    if template is None and not has_template(tokenizer):
        raise ConfigError(f"the tokenizer has {templates(tokenizer)}; --chat-template FILE gives one")
    if dates:
        said = lambda call: json.dumps(dates[call["format"]]) if call["format"] in dates else call[0]  # noqa: E731
        template = _CLOCK.sub(said, template_of(tokenizer, template, tools=bool(tools)))
    given = {"tools": list(tools)} if tools else {}
    try:
        text: str = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **given, **how)
    except TemplateError as error:
        raise ConfigError(f"the chat template refuses the messages: {error}") from error
    except Exception as error:  # a template can raise whatever Python does
        raise ConfigError(f"the chat template fails: {type(error).__name__}: {error}") from error
    if not text:
        raise ConfigError("the chat template makes no text of the messages")
    return text


def templates(tokenizer: Any) -> str:
    """Describe, for an error, the chat templates of a tokenizer that has no default one."""
    names = getattr(tokenizer, "chat_template", None) or {}
    return f"the chat templates {', '.join(map(repr, names))}, but none named 'default'" if names else "no chat template"


def template_of(tokenizer: Any, template: str | None = None, *, tools: bool = False) -> str:
    """Return the template in use, "" if there is none. Of a tokenizer's several it is "default", or with tools "tool_use"."""
    own = tokenizer.chat_template if has_template(tokenizer) else ""
    if isinstance(own, dict):
        own = own["tool_use" if tools and "tool_use" in own else "default"]
    found: str = template or own
    return found


_DATED = 64  # tokens that a date may have more than today's


_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the switch for thinking."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Asks through a tokenizer's chat template, the prompt as one message of the user.

    system: a message before it.
    thinking: switched on or off; None leaves it to the template.
    """

    system: str | None = None
    thinking: bool | None = None

    def check(self, tokenizer: Any) -> None:
        """Raise ConfigError if the tokenizer's template does not support these options."""
        if not has_template(tokenizer):
            raise ConfigError(f"chat, a system prompt or thinking is asked for, but the tokenizer has {templates(tokenizer)}")
        if self.system is not None and self.system.strip() not in self.render(tokenizer, "Hello."):
            raise ConfigError("system is given, but the chat template leaves the system prompt out")
        if self.thinking is not None:
            other = replace(self, thinking=not self.thinking)
            if self.render(tokenizer, "Hello.") == other.render(tokenizer, "Hello."):
                word = "on" if self.thinking else "off"
                raise ConfigError(f"thinking is to be {word}, but the chat template does not know {' or '.join(_SWITCHES)}")

    def render(self, tokenizer: Any, prompt: str, dates: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the text that asks for an answer to a prompt.

        dates: see `render`.
        """
        return self.turns(tokenizer, [{"role": "user", "content": prompt}], dates=dates)

    def turns(
        self, tokenizer: Any, messages: Sequence[Mapping[str, str]], *, dates: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Return the text that asks for an answer after several messages.

        dates: see `render`.
        """
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        switch: dict[str, Any] = {} if self.thinking is None else dict.fromkeys(_SWITCHES, self.thinking)
        return render(tokenizer, messages, dates=dates, add_generation_prompt=True, **switch)


def following(document: str, question: str) -> str:
    """Return a question as it follows a document: on a line of its own."""
    apart = not document or document.endswith("\n") or question[:1] in ("", "\n")
    return question if apart else f"\n{question}"


def dates_of_kept(tokenizer: Any, chat: Chat, kept: Sequence[int], prompt: str) -> dict[str, str]:
    """Return the date that a chat template should print, by format: today's, or a saved prompt's if more tokens are shared then.

    kept: tokens of the saved prompt, empty without one.
    """
    today = dates_of(tokenizer)
    draw, read = partial(chat.render, tokenizer), partial(encode, tokenizer)
    if not today or not kept:
        return today
    ids, start = read(draw(prompt, today)), len(read(opening(draw, today)))
    if (dates := dates_said(decode(tokenizer, kept[: start + _DATED]), draw, today)) is None:
        return today
    at = len(read(opening(draw, dates)))
    return dates if at + common(kept[at:], ids[start:]) > common(kept, ids) else today


def split_prompt(
    tokenizer: Any,
    context: str,
    question: str,
    chat: Chat | None = None,
    *,
    dates: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of what follows it. Together they are the whole prompt's tokens.

    A token that spans both belongs to the question.

    chat: use the tokenizer's template, whose end then belongs to the question.
    dates: see `render`.
    """
    prompt, before = context + question, context
    if chat is not None:
        whole_text = chat.render(tokenizer, prompt, dates)
        at = whole_text.rfind(question) if question else len(whole_text)
        if at < 0:
            raise ConfigError("the chat template changes the question, so context and question cannot be told apart")
        prompt, before = whole_text, whole_text[:at]
    special = {"add_special_tokens": False} if chat is not None else {}
    whole: list[int] = list(tokenizer(prompt, verbose=False, **special)["input_ids"])
    if prompt == before:
        return whole, []
    alone: list[int] = list(tokenizer(before, verbose=False, **special)["input_ids"]) if before else []
    same = common(whole, alone)
    return whole[:same], whole[same:]
