"""Text as tokens: the shipped book or a user's text, and the tokens that begin a prompt."""

from __future__ import annotations

import hashlib
from typing import Any

from kvthaw.engine.text import encode
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_asset


def tokens_of(tokenizer: Any, text: str | None) -> list[int]:
    """Return the tokens of a text, None the book that ships, without special ones. Raises ConfigError for a text without tokens."""
    body = encode(tokenizer, read_asset("book.txt") if text is None else text)
    if not body:
        raise ConfigError("the text holds no tokens")
    return body


def opening(tokenizer: Any) -> list[int]:
    """Return the special tokens before a prompt."""
    whole, bare = list(tokenizer("a")["input_ids"]), encode(tokenizer, "a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:at]


def text_name(text: str | None) -> str:
    """Return what settings call a text: its hash, or "book" for what ships."""
    return "book" if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
