"""From tokens to the text of an answer: which tokens and texts end it, and pieces as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from kvthaw.engine.chat_template import dates_of, dates_said, has_template, opening, render, templates
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.kv_dir import common
from kvthaw.engine.text import StopStrings, TextStream, special_tokens
from kvthaw.errors import ConfigError


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a generation, from the generation config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


class AnswerText:
    """The text of an answer as its tokens come, up to one of the strings that end it.

    after_first_word: strings before the answer's first word do not end it.
    after: tokens before the answer; see TextStream.
    text: all of it so far.
    stopped: whether a string ended it.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, after_first_word: bool = False, after: Sequence[int] = ()
    ) -> None:
        self.text = ""
        self._stops = StopStrings(stops, special=special_tokens(tokenizer, stops))
        self._stream, self._begun = TextStream(tokenizer, marks=self._stops.marks, after=after), not after_first_word

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: int) -> str:
        """Return the text that a token adds."""
        return self._add(self._stream.push(token))

    def finish(self) -> str:
        """Return the text that was held back."""
        new = self._add(self._stream.finish())
        rest = self._stops.finish()
        self.text += rest
        return new + rest

    def _add(self, piece: str) -> str:
        lead = "" if self._begun else piece[: len(piece) - len(piece.lstrip())]
        self._begun = self._begun or lead != piece
        new = lead + self._stops.push(piece[len(lead) :])
        self.text += new
        return new


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

    def setting(self) -> dict[str, Any]:
        """Return the given options of the template, on which a record depends."""
        return {name: value for name, value in asdict(self).items() if value is not None}

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


def spoken(text: str, stops: Sequence[str] = ()) -> str:
    """Return a model's output after its thoughts, if any, up to the first stop string that follows its first word."""
    said = text.rpartition("</think>")[2].lstrip() if "</think>" in text else text
    return said[
        : min((at for stop in stops if (at := said.find(stop, len(said) - len(said.lstrip()))) >= 0), default=len(said))
    ]


def following(document: str, question: str) -> str:
    """Return a question as it follows a document: on a line of its own."""
    apart = not document or document.endswith("\n") or question[:1] in ("", "\n")
    return question if apart else f"\n{question}"


def dates_of_kept(tokenizer: Any, chat: Chat, kept: Sequence[Sequence[int]], prompt: str) -> dict[str, str]:
    """Return the date that a chat template should print, by format. Use the date of the saved prompt that shares most tokens
    with this one, or today's if no saved prompt shares more.

    kept: tokens of saved prompts.
    """
    today = dates_of(tokenizer, datetime.now())
    draw = partial(chat.render, tokenizer)

    def read(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    if not today or not kept:
        return today
    ids, start = read(draw(prompt, today)), len(read(opening(draw, today)))
    best, most = today, max(common(one, ids) for one in kept)
    for one in kept:
        text = tokenizer.decode(one[: start + _DATED], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if (dates := dates_said(text, draw, today)) is not None:
            at = len(read(opening(draw, dates)))
            if (held := at + common(one[at:], ids[start:])) > most:
                best, most = dates, held
    return best


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
    same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), min(len(whole), len(alone)))
    return whole[:same], whole[same:]
