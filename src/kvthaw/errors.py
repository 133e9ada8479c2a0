"""Errors that name the field, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvthawError(Exception):
    """Base of every error that kvthaw raises itself."""


class ConfigError(KvthawError, ValueError):
    """A setting is out of range or settings do not fit together."""


class UnsupportedModelError(KvthawError, TypeError):
    """The model cannot be attached to; the message says why."""


class CacheError(KvthawError, RuntimeError):
    """A cache was used in a way that would give a wrong answer."""


class HostMemoryError(KvthawError, MemoryError):
    """The host cannot hold the KV that would be offloaded; the message gives the bytes needed."""


class NotBuiltError(KvthawError, ImportError):
    """The part in C++ is missing; the message says how it is built."""


def at_least(least: float, **values: float | None) -> None:
    """Raise ConfigError for the first of some fields whose value is less; None is none."""
    for field, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{field} is {value}; it must be at least {least}")


def one_of(allowed: Iterable[str], **values: object) -> None:
    """Raise ConfigError for the first of some fields whose value is none of those that are allowed."""
    names = list(allowed)
    for field, value in values.items():
        if value not in names:
            raise ConfigError(f"{field} is {value!r}; it must be one of {', '.join(names)}")


def unknown(field: str, value: str, known: Iterable[str]) -> ConfigError:
    """That a name is none of those that are known; which is the nearest."""
    names = list(known)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? There are" if near else "there are"
    return ConfigError(f"{field} is {value!r}; {hint}: {', '.join(names)}")
