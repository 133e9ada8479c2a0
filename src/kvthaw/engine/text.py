"""Turn a sequence's tokens into text as they come: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvthaw.errors import ConfigError

_HALF = "�"  # what tokenizers decode bytes to that are no character, or not yet
_LONGEST = 64  # tokens that can be waited for; a character takes at most four


class TextStream:
    """Decode tokens one by one into pieces of text, of which none ends within a character.

    The pieces together are what the tokenizer decodes all tokens to. Wherever more than 64 tokens in a row end in bytes that are no
    character, they are given as they are.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._given: list[int] = []  # the tokens of the last piece
        self._held: list[int] = []  # those after it

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        self._held.append(token)
        piece = self._step(token)
        if len(self._held) > _LONGEST:
            return self.finish()
        if not piece or piece.endswith(_HALF):
            return ""
        self._given, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """Return the text of the tokens that were held back, and start over."""
        piece = self._rest()
        self._given, self._held = [], []
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return piece

    def _step(self, token: int) -> str | None:
        if self._backend is None:  # a tokenizer that is written in Python
            return self._rest()
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # bytes after a character have made it none, and tokenizers' stream can take nothing back
            self._stream = DecodeStream(ids=[token], skip_special_tokens=self._skip)
            return self._rest()
        return piece

    def _rest(self) -> str:
        return self._decode(self._given + self._held)[len(self._decode(self._given)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """Watch text that comes in pieces for strings that end it.

    The text ends where the first of the strings is complete, wherever pieces begin and end; of several that are complete with
    the same character the longest counts. What may become a stop string is held back. include: the text ends behind the stop
    string, not before it. found: the string that ended the text, None before that.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        if isinstance(strings, str) or "" in strings:
            raise ConfigError(f"the stop strings are {strings!r}; they must be a sequence of strings that are not empty")
        self.strings, self.include = tuple(strings), include
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that is certain to come before a stop string; nothing when one was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), -len(stop), stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end if self.include else end - len(self.found)]
        held = max((self._begun(text, stop) for stop in self.strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """The text of one output, of whole characters and up to a stop string.

    tokenizer: transformers'. stop, include_stop: strings that end the text, and whether it ends behind them; see StopStrings.
    min_tokens: text of so many tokens is not searched. text: all the text so far; stopped_by: the stop string that ended it.

    Example::

        out = Detokenizer(tokenizer, stop=["\\n\\n"])
        for token in tokens:
            print(out.push(token), end="")
            if out.stopped_by is not None:
                break
        print(out.finish())
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self.text = ""
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(stop, include=include_stop)
        self._unsearched = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None before that."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Return the text that a token adds."""
        piece = self._stream.push(token)
        if self._unsearched > 0:
            self._unsearched -= 1
            return self._add(piece)
        return self._add(self._stops.push(piece))

    def finish(self) -> str:
        """Return the text that was held back, a character of which only a part has come included."""
        return self._add(self._stops.push(self._stream.finish()) + self._stops.finish())

    def _add(self, piece: str) -> str:
        self.text += piece
        return piece
