"""Whether a value is of the kind that an annotation says, and how to say what it must be."""

from __future__ import annotations

from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kvthaw.errors import ConfigError

_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", NoneType: "None"}


def is_of(value: object, kind: Any) -> bool:
    """Whether a value is of a kind: a type, a Literal, a tuple[one, ...] or a union of such. True and False are no numbers."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) in (Union, UnionType):
        return any(is_of(value, part) for part in parts)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_of(one, parts[0]) for one in value)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def words(kind: Any) -> str:
    """A kind in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(words(part) for part in get_args(kind) if part is not int or float not in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a tuple, each of it {words(get_args(kind)[0])}"
    return _WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def of_kind(kind: Any, **values: object) -> None:
    """Raise ConfigError for the first of some fields whose value is of another kind."""
    for field, value in values.items():
        if not is_of(value, kind):
            raise ConfigError(f"{field} is {value!r}; it must be {words(kind)}")
