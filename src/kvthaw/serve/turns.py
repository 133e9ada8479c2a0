"""Conversations as texts and tokens, including ones that continue a kept prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvthaw.engine.chat_template import Draw, dates_of, dates_said, following, has_template, opening, render, template_of
from kvthaw.engine.text import decode, encode
from kvthaw.engine.tool_calls import ToolFormat, tool_format
from kvthaw.serve.schema import Message

Read = Callable[[str, Sequence[int]], list[int]]
"""Returns the tokens of a rendered template, behind the tokens that precede it."""


class Turns:
    """Renders and encodes conversations through a chat template. Raises ConfigError as `render` does.

    template: Jinja; None: the tokenizer's.
    tools: functions that the model may call, as templates read them.
    """

    def __init__(self, tokenizer: Any, template: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer, self._template, self._tools = tokenizer, template, tools

    @property
    def possible(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None or has_template(self._tokenizer)

    def having(self, tools: Sequence[Mapping[str, Any]]) -> Turns:
        """Return the same with other tools."""
        return Turns(self._tokenizer, self._template, tools)

    def tool_format(self) -> ToolFormat:
        """Return how the model writes calls; raises ConfigError if the template takes no tools."""
        return tool_format(template_of(self._tokenizer, self._template, tools=True))

    def encode(self, read: Read, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Return the tokens of a conversation, with answer up to where the answer begins."""
        return read(self._render(messages, answer=answer), ())

    def opened(self, text: str) -> str:
        """Return the beginning of a conversation about a document, up to the document's end. The first question follows."""
        return opening(self._draw()) + text.rstrip()

    def document(self, text: str) -> list[int]:
        """Return the tokens of a document that the first question follows."""
        return encode(self._tokenizer, self.opened(text))

    def opens(self, kept: Sequence[int]) -> bool:
        """Return whether kept tokens begin as conversations do, on any day."""
        return self._dates(decode(self._tokenizer, kept)) is not None

    def after_messages(self, read: Read, kept: Sequence[int], before: Sequence[Message], new: Sequence[Message]) -> list[int]:
        """Return the tokens of kept messages and of new ones. Kept tokens stay unchanged, even if the date has changed."""
        both = [*before, *new]
        ids = read(self._render(both), ())
        return ids if ids[: len(kept)] == list(kept) else self._after(read, kept, both, decode(self._tokenizer, kept)) or ids

    def after_document(self, read: Read, kept: Sequence[int], about: Any, new: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation whose first question follows a kept text. Kept tokens that begin like a
        conversation stay unchanged.

        about: see `document_of`.
        """
        text, known, first = decode(self._tokenizer, kept), document_of(about), len(_leading(new))
        found = [(each, dates) for each in (self, self.having(())) if (dates := each._dates(text)) is not None]
        if known is not None:
            document = known.rstrip()
        elif found:
            turns, dates = found[0]
            document = text[len(opening(turns._draw(), dates)) :]
        else:
            document = decode(self._tokenizer, kept, special=False)
        asked = new[first].plain()["content"] if first < len(new) else ""
        opened = Message(role="user", content=document + following(document, asked))
        whole = [*new[:first], opened, *new[first + 1 :]]
        return self._after(read, kept, whole, text) or read(self._render(whole), ())

    def _after(self, read: Read, kept: Sequence[int], messages: Sequence[Message], text: str) -> list[int] | None:
        """Return kept tokens and the tokens after them in a conversation; None if it does not begin with their text."""
        dates = self._dates(text, _leading(messages))
        whole = "" if dates is None else self._render(messages, dates)
        return [*kept, *read(whole[len(text) :], kept)] if len(whole) > len(text) and whole.startswith(text) else None

    def _dates(self, text: str, leading: Sequence[Message] = ()) -> dict[str, str] | None:
        """Return the dates in a text; None if it does not begin like a conversation."""
        return dates_said(text, self._draw(leading), dates_of(self._tokenizer, self._template))

    def _draw(self, leading: Sequence[Message] = ()) -> Draw:
        """Return a function that renders the first user message.

        leading: messages before it.
        """
        return lambda said, dates: self._render([*leading, Message(role="user", content=said)], dates)

    def _render(
        self, messages: Sequence[Message], dates: Mapping[str, str] = MappingProxyType({}), *, answer: bool = True
    ) -> str:
        turns = [message.plain() for message in messages]
        return render(self._tokenizer, turns, self._template, dates=dates, tools=self._tools, add_generation_prompt=answer)


def _leading(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the first user's."""
    first = next((i for i, one in enumerate(messages) if one.role == "user"), len(messages))
    return messages[:first]


def about_document(text: str) -> dict[str, str]:
    """Return the description to save with a document that begins conversations."""
    return {"document": text}


def document_of(about: Any) -> str | None:
    """Return the document of a saved description; None for messages or no description."""
    return about["document"] if isinstance(about, dict) and isinstance(about.get("document"), str) else None
