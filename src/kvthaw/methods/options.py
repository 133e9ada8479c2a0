"""Options of methods: read from a name, and checked against what a method says that it takes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.kinds import of_kind


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
            of_kind(named[name], **{name: value})
        elif len(takes) > 1 or len(named) == len(known):
            has = f"there are: {', '.join(named)}" if named else "it has none"
            raise ConfigError(f"method {method} has no option {name!r}; {has}")
