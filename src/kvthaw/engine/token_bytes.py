"""Bytes of single tokens, and their offsets in a text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from kvthaw.engine.text import TextStream, decode, encode, is_special

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token for a byte without its own token


class TokenBytes:
    """The bytes of each token within a text, including a part of a character, or a space before a word.

    tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        kinds = {"ByteFallback"} if backend is None else _decoders(backend.decoder)
        self._alphabet = _alphabet() if "ByteLevel" in kinds else None
        self._has_bytes = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        self._before: list[int] | None = None  # a token of text, after which others are decoded

    def of(self, token: int) -> bytes:
        """Return a token's bytes; none for an id that the tokenizer does not have."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def text(self, token: int) -> str:
        r"""Return a token's bytes as text, or as "bytes:\xe6\x97" if they are no text, as OpenAI does."""
        own = self.of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def _find(self, token: int) -> bytes:
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError):  # tokenizers written in Python look ids up
            name = None
        if name is None:
            return b""
        if isinstance(name, bytes):  # some tokenizers written in Python name tokens by their bytes
            return name
        if self._alphabet is not None:
            numbers = [self._alphabet.get(letter) for letter in name]
            known = [number for number in numbers if number is not None]
            return bytes(known) if len(known) == len(numbers) else name.encode()
        if self._has_bytes and (byte := _BYTE.fullmatch(name)):
            return bytes.fromhex(byte[1])
        before = self._text_token()
        return decode(self._tokenizer, [*before, token])[len(decode(self._tokenizer, before)) :].encode()

    def _text_token(self) -> list[int]:
        if self._before is None:
            self._before = encode(self._tokenizer, "a")[-1:]
        return self._before


class Offsets:
    """Offsets of tokens in a text, in characters. A token that begins within a character has that character's offset.

    after: tokens whose text this one continues.
    """

    def __init__(self, tokenizer: Any, token_bytes: TokenBytes, after: Sequence[int] = ()) -> None:
        self._tokenizer, self._stream, self._bytes = tokenizer, TextStream(tokenizer, after=after), token_bytes
        self._length = 0  # characters that the stream has returned
        self._held = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0  # whole characters among the bytes that it holds back

    def push(self, token: int) -> int:
        """Return the offset of the next token."""
        at = self._length + self._characters
        piece = self._stream.push(token)
        if piece:
            self._commit(piece)
        elif not is_special(self._tokenizer, token):
            self._characters += len(self._held.decode(self._bytes.of(token)))
        return at

    def begin(self) -> None:
        """End a text, after which another one follows."""
        self._commit(self._stream.finish())

    def _commit(self, piece: str) -> None:
        self._length += len(piece)
        self._characters = 0
        self._held.reset()


def _decoders(decoder: Any) -> set[str]:
    """Return the kinds of a tokenizer's decoders."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return {part["type"] for part in parts}


def _alphabet() -> dict[str, int]:
    """Return the bytes of byte-level letters: a printable letter is its own byte, the others follow in order from U+0100."""
    letters = set(ByteLevel.alphabet())
    own = {chr(byte) for byte in range(256)} & letters
    others = iter(sorted(letters - own))
    return {chr(byte) if chr(byte) in own else next(others): byte for byte in range(256)}
