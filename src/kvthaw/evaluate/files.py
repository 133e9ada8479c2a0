"""Texts that ship, and published files."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError

ASSETS = Path(__file__).parents[1] / "assets"


@cache
def read_asset(name: str) -> str:
    """Return a text that ships with the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """Return the text of a file, which may be gzipped. Raises ConfigError if the file does not exist."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"data is {str(path)!r}; there is no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"data is {str(path)!r}, which cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, or the list in a file of JSON lines. Raises ConfigError for any other file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:  # not splitlines(): JSON text may hold other line separators
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(
            f"data is {str(path)!r}, which cannot be read; it is not JSON, and not a file of JSON lines: {error}"
        ) from error


def read_records(path: Path, field: str) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file. Raises ConfigError if the file has no JSON lines or a record lacks `field`."""
    found = read_json(path)
    records = found if isinstance(found, list) else [found]
    if not records or not all(isinstance(record, dict) and field in record for record in records):
        raise ConfigError(f"data is {str(path)!r}; every line must be an object with the field {field!r}")
    return records
