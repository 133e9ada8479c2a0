"""A text that is too long for a model, without its middle."""

from __future__ import annotations

from typing import Any

from kvthaw.engine.text import decode, encode
from kvthaw.errors import ConfigError
from kvthaw.formatting import counted

_MARK = "\n\n[... {:,} characters are left out here ...]\n\n"
_SPARE = 64
"""Tokens for that line, and for words that a cut divides."""
_LETTERS = 16
"""Characters that a token has at most, on average: this function does not tokenize a longer text whole."""


def without_middle(tokenizer: Any, text: str, most: int) -> tuple[str, int]:
    """Return a text's beginning and end around a line about the gap, and the number of characters that are left out.

    A text of at most `most` tokens stays whole. Raises ConfigError where `most` leaves no room for both."""
    if len(text) <= _LETTERS * most and len(encode(tokenizer, text)) <= most:
        return text, 0
    half = (most - _SPARE) // 2
    if half < 1:
        raise ConfigError(
            f"the text may have {counted(most, 'token')}, which is too few to cut it; it must be at least {_SPARE + 2}"
        )
    start = encode(tokenizer, text[: _LETTERS * half])[:half]
    end = encode(tokenizer, text[-_LETTERS * half :])[-half:]
    first, last = min(len(decode(tokenizer, start)), len(text)), max(0, len(text) - len(decode(tokenizer, end)))
    if last <= first:
        return text, 0
    return text[:first] + _MARK.format(last - first) + text[last:], last - first
