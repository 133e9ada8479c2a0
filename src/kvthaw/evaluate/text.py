"""From tokens to the text of an answer: which tokens and texts end it, and pieces as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.text import StopStrings, TextStream
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

    after_first_word: strings before the answer's first word do not end it. text: all of it so far; stopped: whether a string ended
    it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, after_first_word: bool = False) -> None:
        self.text = ""
        self._stream, self._stops, self._begun = TextStream(tokenizer), StopStrings(stops), not after_first_word

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
