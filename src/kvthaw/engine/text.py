"""Decode a sequence's tokens into text as they come: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers.decoders import DecodeStream

from kvthaw.errors import ConfigError

_HALF = "�"  # how tokenizers decode bytes that are no character, or not yet
_LONGEST = 64  # limit on tokens to hold back; a character takes at most four
_MARK = 0xD800  # the first of the code points that occur in no text; some are placeholders for special tokens
_NONE: Mapping[Any, str] = MappingProxyType({})


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone, without special tokens before or behind it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """Return the text of tokens as it is.

    special: False: leave special tokens out.
    """
    text: str = tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


def is_special(tokenizer: Any, token: int) -> bool:
    """Return whether a token is left out of an answer's text."""
    return not tokenizer.decode([token], skip_special_tokens=True) and bool(tokenizer.decode([token]))


def special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """Return the special tokens that occur in texts, with their names."""
    found = {token for text in texts for token in encode(tokenizer, text)}
    named = {token: tokenizer.convert_ids_to_tokens(token) for token in found if is_special(tokenizer, token)}
    return {token: name for token, name in sorted(named.items()) if any(name in text for text in texts)}


def tokens_after(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that continues another one, without the space that some tokenizers add in front."""
    if encode(tokenizer, "\na") != [*encode(tokenizer, "\n"), *encode(tokenizer, "a")]:
        for before in ("a", "\n", "."):
            alone, both = encode(tokenizer, before), encode(tokenizer, before + text)
            if tokenizer.unk_token_id not in alone and both[: len(alone)] == alone:
                return both[len(alone) :]
    return encode(tokenizer, text)


class TextStream:
    """Decode tokens one by one into pieces of text. No piece ends within a character.

    The concatenated pieces equal the tokenizer's text of all tokens. If more than 64 tokens in a row end in bytes that are
    no character, they are returned as they are.

    marks: special tokens to return as this text; others are left out.
    after: tokens whose text the pieces continue. Some tokenizers drop the space before the first word of a text, which is
        then kept.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        marks: Mapping[int, str] = _NONE,
        after: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._given = self._end_of(after)  # the tokens of the last piece
        self._held: list[int] = []  # tokens after it
        self._stream = self._new_stream()

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        if token in self._marks:
            return (self.finish() if self._rest() else "") + self._marks[token]
        self._held.append(token)
        piece = self._step(token)
        if len(self._held) > _LONGEST:
            return self.finish()
        if not piece or piece.endswith(_HALF):
            return ""
        self._given, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """Return the text of the held-back tokens. Later tokens continue the last whole piece."""
        piece = self._rest()
        self._held = []
        self._stream = self._new_stream()
        return piece

    def _step(self, token: int) -> str | None:
        if self._backend is None:  # a tokenizer written in Python
            return self._rest()
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # later bytes invalidated a character, and tokenizers' stream cannot undo it
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
            return self._rest()
        return piece

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._given, skip_special_tokens=True)

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the fewest last tokens that decode to visible text of whole characters; none if there are none."""
        for n in range(1, min(len(tokens), _LONGEST) + 1):
            text = self._decode(tokens[-n:])
            if text.strip() and _HALF not in text:
                return list(tokens[-n:])
        return []

    def _rest(self) -> str:
        return self._decode(self._given + self._held)[len(self._decode(self._given)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens, special=False)


class StopStrings:
    """Watch text that comes in pieces for strings that end it.

    The text ends where the first of the strings is complete, wherever pieces begin and end. If several end at the same
    character, the longest counts. Text that may become a stop string is held back.

    include: the text ends after the stop string instead of before it.
    special: special tokens that the strings may spell, and that the text does not show.
    marks: placeholder characters for these tokens in the pieces.
    found: the string that ended the text; None before.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False, special: Mapping[int, str] = _NONE) -> None:
        if isinstance(strings, str) or "" in strings:
            raise ConfigError(f"the stop strings are {strings!r}; they must be a sequence of strings that are not empty")
        self.strings, self.include = tuple(strings), include
        self.found: str | None = None
        self.marks = {token: chr(_MARK + i) for i, token in enumerate(special)}
        by_length = sorted(special, key=lambda token: len(special[token]), reverse=True)
        self._watched: dict[str, str] = {}  # strings that end the text, and the stop string of each
        for stop in self.strings:
            marked = stop
            for token in by_length:
                marked = marked.replace(special[token], self.marks[token])
            self._watched |= {stop: stop, marked: stop}
        self._hidden = {ord(mark): None for mark in self.marks.values()}
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that certainly comes before a stop string; "" once one was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), -len(stop), stop) for stop in self._watched if (at := text.find(stop)) >= 0]
        if ends:
            end, length, stop = min(ends)
            self._held, self.found = "", self._watched[stop]
            return self.shown(text[: end + length]) + (self.found if self.include else "")
        held = max((begun(text, stop) for stop in self._watched), default=0)
        self._held = text[len(text) - held :]
        return self.shown(text[: len(text) - held])

    def finish(self) -> str:
        """Return the held-back text."""
        held, self._held = self._held, ""
        return self.shown(held)

    def shown(self, piece: str) -> str:
        """Return a piece without its marks."""
        return piece.translate(self._hidden) if self._hidden else piece


class Detokenizer:
    """The text of one output, in whole characters and up to a stop string.

    tokenizer: a transformers tokenizer.
    stop: strings that end the text; see StopStrings. They may spell special tokens, which the text itself leaves out.
    include_stop: the text ends after the stop string.
    min_tokens: the text of the first `min_tokens` tokens is not searched.
    after: tokens whose text this one continues, such as a prompt; see TextStream.
    show: special tokens that the text does not leave out.
    text: all text so far.
    stopped_by: the stop string that ended it.

    Example::

        out = Detokenizer(tokenizer, stop=["\\n\\n"])
        for token in tokens:
            print(out.push(token), end="")
            if out.stopped_by is not None:
                break
        print(out.finish())
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        after: Sequence[int] = (),
        show: Sequence[str] = (),
    ) -> None:
        self.text = ""
        self._stops = StopStrings(stop, include=include_stop, special=special_tokens(tokenizer, stop))
        self._stream = TextStream(tokenizer, marks=self._stops.marks | special_tokens(tokenizer, show), after=after)
        self._unsearched = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None before."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Return the text that a token adds."""
        piece = self._stream.push(token)
        if self._unsearched > 0:
            self._unsearched -= 1
            return self._add(self._stops.shown(piece))
        return self._add(self._search(piece))

    def finish(self) -> str:
        """Return the held-back text, including an incomplete character."""
        return self._add(self._search(self._stream.finish()) + self._stops.finish())

    def _search(self, piece: str) -> str:
        return self._stops.push(piece)

    def _add(self, piece: str) -> str:
        self.text += piece
        return piece


def begun(text: str, word: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a word."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two prompts, in tokens or characters."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
