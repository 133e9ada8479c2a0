"""From tokens to the text of an answer: which tokens and texts end it, and pieces as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvthaw.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a generation, from the generation config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Texts that end an answer and are no part of it. after_first_word: those before its first word do not count."""

    strings: tuple[str, ...]
    after_first_word: bool = False

    def cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        start = len(text) - len(text.lstrip()) if self.after_first_word else 0
        return text[: min((at for stop in self.strings if (at := text.find(stop, start)) >= 0), default=len(text))]

    def ended(self, tokenizer: Any, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens hold a stop string. Decoding all of them at every step would be quadratic."""
        if not self.strings:
            return False
        tail = max(len(text.encode()) for text in self.strings) + 8  # a token is a byte at least
        text: str = tokenizer.decode(tokens if self.after_first_word else tokens[-tail:], skip_special_tokens=True)
        return self.cut(text) != text


class TextStream:
    """Turns tokens into text as they come; holds back bytes that are not a whole character yet."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""
        self._from, self._to = 0, 0  # the last tokens that were shown: what comes is decoded behind them, not behind all

    @property
    def text(self) -> str:
        """All the text so far."""
        return self._decode(self.tokens)

    def push(self, token: int) -> str:
        """Return the text that a token adds."""
        self.tokens.append(token)
        known, text = self._decode(self.tokens[self._from : self._to]), self._decode(self.tokens[self._from :])
        if text.endswith("�"):
            return ""
        self._from, self._to = self._to, len(self.tokens)
        self.shown += text[len(known) :]
        return text[len(known) :]

    def finish(self) -> str:
        """Return what was held back."""
        rest = self.text[len(self.shown) :]
        self.shown += rest
        return rest

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def split_prompt(tokenizer: Any, context: str, question: str, chat: bool = False) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows it, together those of the whole prompt; one that spans both is the question's.

    chat: as one message of a user, through the tokenizer's template, which then is the question's end.
    """
    prompt, before = context + question, context
    if chat:
        message = [{"role": "user", "content": prompt}]
        whole_text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        at = whole_text.rfind(question) if question else len(whole_text)
        if at < 0:
            raise ConfigError("the chat template changes the question, so context and question cannot be told apart")
        prompt, before = whole_text, whole_text[:at]
    special = {"add_special_tokens": False} if chat else {}
    whole: list[int] = list(tokenizer(prompt, verbose=False, **special)["input_ids"])
    if prompt == before:
        return whole, []
    alone: list[int] = list(tokenizer(before, verbose=False, **special)["input_ids"]) if before else []
    same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), min(len(whole), len(alone)))
    return whole[:same], whole[same:]
