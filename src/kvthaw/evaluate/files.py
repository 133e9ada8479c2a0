"""Texts that ship, published files, and a text's tokens."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvthaw.engine.text import encode
from kvthaw.errors import ConfigError

ASSETS = Path(__file__).parents[1] / "assets"


@cache
def read_asset(name: str) -> str:
    """Return a text that ships with the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def read_text(path: Path, name: str = "data") -> str:
    """Return the text of a file, which may be gzipped. Raises ConfigError, which calls it by `name`, if there is none."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name} is {str(path)!r}; there is no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error}") from error


def read_json(path: Path, name: str = "data") -> Any:
    """Return the value in a JSON file, or the list in a file of JSON lines. Raises ConfigError for any other file."""
    text = read_text(path, name)
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:  # not splitlines(): JSON text may hold other line separators
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(
            f"{name} is {str(path)!r}, which cannot be read; it is not JSON, and not a file of JSON lines: {error}"
        ) from error


def read_records(path: Path, field: str, name: str = "data") -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file. Raises ConfigError if the file has no JSON lines or a record lacks `field`."""
    found = read_json(path, name)
    records = found if isinstance(found, list) else [found]
    if not records or not all(isinstance(record, dict) and field in record for record in records):
        raise ConfigError(f"{name} is {str(path)!r}; every line must be an object with the field {field!r}")
    return records


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Return the field "prompt" of the first `limit` lines of a JSON-lines file. Raises ConfigError for a file of another kind."""
    found = [record["prompt"] for record in read_records(path, "prompt", "prompts")[:limit]]
    for number, text in enumerate(found, 1):
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"prompts is {str(path)!r}; the prompt of record {number} is {text!r}, it must be a text")
    return found


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
