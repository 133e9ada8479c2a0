"""Options of a benchmark: one frozen dataclass, read from text in the same way by the command line and by name=value
arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from kvthaw.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reader:
    """How an option's text becomes its value. read raises ValueError for what is not `kind`."""

    kind: str
    read: Callable[[str], Any]


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def budget_of(text: str) -> int | float:
    """A budget: tokens, or with a point a fraction of the prompt. Raises ValueError."""
    return float(text) if "." in text else int(text)


INTEGER = Reader("a whole number", int)
SHARE = Reader("a number", float)
BUDGET = Reader("a whole number, or with a point a fraction of the prompt", budget_of)
WORD = Reader("a word", str)
FILE = Reader("a file", Path)
FLAG = Reader("0 or 1", _flag)


def at_least(least: int) -> Reader:
    """Whole numbers from that one on."""

    def read(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    return Reader(f"a whole number of at least {least}", read)


def many(of: Reader) -> Reader:
    """Several of a kind, separated by commas, without repeats."""

    def read(text: str) -> tuple[Any, ...]:
        found = tuple(dict.fromkeys(of.read(part.strip()) for part in text.split(",") if part.strip()))
        if not found:
            raise ValueError(text)
        return found

    return Reader(f"one or more, separated by commas, each {of.kind}", read)


def option(default: Any, about: str, reader: Reader) -> Any:
    """A field of an options class."""
    return field(default=default, metadata={"about": about, "reader": reader})


def about(one: Field[Any]) -> str:
    """What an option is for."""
    return str(one.metadata["about"])


def shown(one: Field[Any]) -> str | None:
    """An option's default as one would write it, None for none."""
    value = one.default
    if value is MISSING or value is None or value == () or value is False:
        return None
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def read(kind: type[T], given: Mapping[str, str]) -> T:
    """The options of a class from text by name. Raises ConfigError that names the option, the text and what is allowed."""
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, text in given.items():
        if name not in known:
            raise ConfigError(f"there is no option {name!r}; there are: {', '.join(known)}")
        reader: Reader = known[name].metadata["reader"]
        try:
            values[name] = reader.read(text)
        except ValueError:
            raise ConfigError(f"{name} is {text!r}; it must be {reader.kind}") from None
    return kind(**values)


def read_pairs(kind: type[T], pairs: Sequence[str]) -> T:
    """The same from arguments "name=value", for machines without the command line's packages."""
    given = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is no argument; arguments are name=value")
        given[name] = text
    return read(kind, given)
