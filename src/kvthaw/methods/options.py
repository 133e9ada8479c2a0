"""Options of methods: read from a name, checked against the method's parameters, and identified by a digest."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, get_type_hints

from kvthaw.cache.index_api import Method
from kvthaw.config import SETTINGS
from kvthaw.errors import ConfigError, hint
from kvthaw.typecheck import check_type, describe

REGIONS = ("sink", "window", "buffer")
"""Options of every method that retrieves, in tokens."""


def written(text: str) -> tuple[str, Any]:
    """Parse an option of a name: "promote=0.1" is ("promote", 0.1). A value that is no Python literal stays a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def take(text: str, kinds: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Remove the options in `kinds` from a method name with options. Returns the remaining name, and their values.

    kinds: the type of each option.

    Raises ConfigError for a value of another type.
    """
    name, *parts = text.split(":")
    given = dict(written(part) for part in parts if part.partition("=")[0] in kinds)
    for option, value in given.items():
        check_type(kinds[option], **{option: value})
    return ":".join([name, *(part for part in parts if part.partition("=")[0] not in kinds)]), given


def check(method: str, given: Mapping[str, Any], *takes: Callable[..., object]) -> None:
    """Raise ConfigError for an option that none of `takes` has, and for a value that is not what its annotation says. What a method
    takes under any name is its own to check, together with what it makes of that."""
    known = {name: one for each in takes for name, one in _parameters(each).items()}
    named = {name: one.annotation for name, one in known.items() if one.kind is not one.VAR_KEYWORD}
    for name, value in given.items():
        if name in named:
            check_type(named[name], **{name: value})
        elif len(takes) > 1 or len(named) == len(known):
            has = f"there are: {', '.join(named)}" if named else "it has none of its own"
            if name in SETTINGS:
                raise ConfigError(f"method {method} has no option {name!r}; give it as a separate argument")
            regions = REGIONS if takes else ()
            raise ConfigError(f"method {method} has no option {name!r}; {hint(name, (*named, *regions, *SETTINGS), has)}")


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return what a function or a dataclass takes, by name. Types of inherited fields are read where their class was written."""
    if not is_dataclass(make):
        return inspect.signature(make, eval_str=True).parameters
    kinds = get_type_hints(make)
    return {name: one.replace(annotation=kinds[name]) for name, one in inspect.signature(make).parameters.items()}


_DECIDES = ("index", "regions", "keep", "anchors", "rotary")
"""What of a Method decides what is attended to; how rows come to the device does not."""


def digest(method: Method) -> str:
    """Return a hash, 16 hexadecimal digits, of all options that a method's choices depend on, by name and value.

    Options of the method, of its index, and of functions and dataclasses that make the index count, defaults included. Raises
    TypeError for an option that is neither plain nor one of these."""
    stored: dict[str, Any] = {} if method.kv_dtype is None else {"kv_dtype": method.kv_dtype}
    stored["prefetches"] = method.prefetches
    stored["evicts"] = method.index is None and not method.dense  # digests of earlier results stay as they are
    text = json.dumps(stored | {name: _plain(getattr(method, name)) for name in _DECIDES}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """Return an option as a JSON value: of a callable its arguments and defaults, of a dataclass its fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if callable(value):
        args, given = (value.args, value.keywords) if isinstance(value, partial) else ((), {})
        named = inspect.signature(value).parameters.values()
        return [_plain(args), _plain({each.name: each.default for each in named if each.default is not each.empty} | given)]
    raise TypeError(f"an option is {value!r}, which has no digest")


def text(make: Callable[..., object]) -> str:
    """Return the docstring of the function that makes a method."""
    while isinstance(make, partial):
        make = make.func
    return inspect.getdoc(make) or ""


def options(make: Callable[..., Method]) -> dict[str, dict[str, Any]]:
    """Return a method's options by name: their default, and in words what they take. Those that its function takes under any name
    are the fields of what its index is made with."""
    named, made = inspect.signature(make, eval_str=True).parameters.values(), make()
    regions = () if made.index is None else REGIONS
    found = {name: {"default": getattr(made.regions, name), "takes": describe(int)} for name in regions} | {
        one.name: {"default": one.default, "takes": describe(one.annotation)}
        for one in named
        if one.kind is not one.VAR_KEYWORD
    }
    if any(one.kind is one.VAR_KEYWORD for one in named) and isinstance(made.index, partial):
        for settings in filter(is_dataclass, (*made.index.args, *made.index.keywords.values())):
            kinds = _parameters(type(settings))
            found |= {
                name: {"default": getattr(settings, name), "takes": describe(one.annotation)} for name, one in kinds.items()
            }
    return found
