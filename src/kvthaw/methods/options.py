"""Options of methods: read from a name, and checked against what a method says that it takes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kvthaw.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", NoneType: "None"}


def written(text: str) -> tuple[str, Any]:
    """An option of a name, as in "promote=0.1": what is no number, True, False, None or tuple is a word."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def check(method: str, given: Mapping[str, Any], *takes: Callable[..., object]) -> None:
    """Raise ConfigError for an option that none of `takes` has, and for a value that is not what its annotation says. What a method
    takes under any name is its own to check, together with what it makes of that."""
    known = {name: one for each in takes for name, one in inspect.signature(each, eval_str=True).parameters.items()}
    named = {name: one.annotation for name, one in known.items() if one.kind is not one.VAR_KEYWORD}
    for name, value in given.items():
        if name in named:
            if not _is(value, named[name]):
                raise ConfigError(f"{name} is {value!r}; it must be {_words(named[name])}")
        elif len(takes) > 1 or len(named) == len(known):
            has = f"there are: {', '.join(named)}" if named else "it has none"
            raise ConfigError(f"method {method} has no option {name!r}; {has}")


def _is(value: object, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, part) for part in parts)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(one, parts[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_words, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a tuple, each of it {_words(get_args(kind)[0])}"
    return _WORDS.get(kind, str(getattr(kind, "__name__", kind)))
