"""Render messages with a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from kvthaw.errors import ConfigError

_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.+?)(?P=quote)\s*\)""")  # how templates ask for the date

_MARKS = 0xE000  # the first placeholder character for dates
Draw = Callable[[str, Mapping[str, str]], str]
"""Renders a conversation with this first user message, and dates by format; see `render`."""


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a default chat template."""
    found = getattr(tokenizer, "chat_template", None)
    return "default" in found if isinstance(found, dict) else bool(found)


def dates_of(tokenizer: Any, now: datetime, template: str | None = None) -> dict[str, str]:
    """Return the dates and times that a template, or else the tokenizer's, would print now, by format."""
    return {call["format"]: now.strftime(call["format"]) for call in _CLOCK.finditer(_taken(tokenizer, template))}


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
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]


def dates_said(text: str, draw: Draw, today: Mapping[str, str]) -> dict[str, str] | None:
    """Return the dates in a conversation's text, by format; None if it begins differently.

    today: as dates_of() returns them.
    """
    marks = {each: chr(_MARKS + i) for i, each in enumerate(today)}
    found = dates_in(text, opening(draw, marks), marks)
    return None if found is None else {each: said if said != marks[each] else today[each] for each, said in found.items()}


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    template: str | None = None,
    *,
    dates: Mapping[str, str] = MappingProxyType({}),
    **how: bool,
) -> str:
    """Return the text of messages.

    Raises ConfigError if there is no template, or if the template refuses the messages or fails.

    template: replaces the tokenizer's; of several templates the one named "default".
    dates: dates to print instead of today's, by format.
    how: further arguments of `apply_chat_template`.
    """
    if template is None and not has_template(tokenizer):
        raise ConfigError(f"the tokenizer has {templates(tokenizer)}; --chat-template FILE gives one")
    if dates:
        said = lambda call: json.dumps(dates[call["format"]]) if call["format"] in dates else call[0]  # noqa: E731
        template = _CLOCK.sub(said, _taken(tokenizer, template))
    try:
        text: str = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **how)
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


def _taken(tokenizer: Any, template: str | None) -> str:
    """Return the template in use, "" if there is none."""
    own = tokenizer.chat_template if has_template(tokenizer) else ""
    found: str = template or (own["default"] if isinstance(own, dict) else own)
    return found
