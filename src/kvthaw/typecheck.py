"""Check values against type annotations, and describe an annotation in an error message."""

from __future__ import annotations

from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kvthaw.errors import ConfigError

_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", NoneType: "None"}


def matches(value: object, annotation: Any) -> bool:
    """Return whether a value has an annotated type: a class, a Literal, tuple[T, ...] or a union of these. A bool is no number."""
    args = get_args(annotation)
    if get_origin(annotation) is Literal:
        return value in args
    if get_origin(annotation) in (Union, UnionType):
        return any(matches(value, arg) for arg in args)
    if get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(matches(item, args[0]) for item in value)
    if annotation in _NUMBERS:
        return isinstance(value, _NUMBERS[annotation]) and not isinstance(value, bool)
    return not isinstance(annotation, type) or isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """Describe an annotation in words."""
    args = get_args(annotation)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, args))}"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(describe(arg) for arg in args if arg is not int or float not in args)
    if get_origin(annotation) is tuple:
        return f"a tuple, each of it {describe(args[0])}"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))


def check_type(annotation: Any, **values: object) -> None:
    """Raise ConfigError for the first field whose value does not match the annotation."""
    for field, value in values.items():
        if not matches(value, annotation):
            raise ConfigError(f"{field} is {value!r}; it must be {describe(annotation)}")
