"""Exceptions, and checks whose messages name the field, its value and the allowed values."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable


class KvthawError(Exception):
    """Base class of kvthaw's exceptions."""


class ConfigError(KvthawError, ValueError):
    """A setting is out of range or conflicts with another one."""


class TooLongError(ConfigError):
    """A prompt of `tokens` tokens and the `wanted` new ones, None for all that fit, do not fit into the `room` of a sequence."""

    def __init__(self, tokens: int, wanted: int | None, room: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens and max_new_tokens is {wanted}; a sequence has room for {room} in all"
        )
        self.tokens, self.wanted, self.room = tokens, wanted, room

    def __reduce__(self) -> tuple[type[TooLongError], tuple[int, int | None, int]]:
        """Pickle the numbers, from which the message is made."""
        return type(self), (self.tokens, self.wanted, self.room)


class UnsupportedModelError(KvthawError, TypeError):
    """kvthaw does not support the model; the message says why."""


class CacheError(KvthawError, RuntimeError):
    """The requested use of a cache would give wrong results."""


class HostMemoryError(KvthawError, MemoryError):
    """The host has too little memory for the offloaded KV; the message gives the bytes needed."""


class QueueFullError(KvthawError, RuntimeError):
    """The queue of waiting requests is full; submit the request again later."""


class ContractError(KvthawError, AssertionError):
    """A method breaks a rule that every method keeps; the message names the method, the rule and the values."""


class NotBuiltError(KvthawError, ImportError):
    """The C++ extension is missing; the message says how to build it."""


def at_least(least: float, **values: float | None) -> None:
    """Raise ConfigError for the first field whose value is less than `least`. Fields that are None pass."""
    for field, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{field} is {value}; it must be at least {least}")


def within(least: float, most: float, **values: float | None) -> None:
    """Raise ConfigError for the first field whose value is not finite and from `least` to `most`. Fields that are None pass."""
    for field, value in values.items():
        if value is not None and not (least <= value <= most and abs(value) <= sys.float_info.max):
            allowed = f"at least {least} and finite" if most == math.inf else f"from {least} to {most}"
            raise ConfigError(f"{field} is {value}; it must be {allowed}")


def proportion(most: float = 1, /, **values: float) -> None:
    """Raise ConfigError for the first field whose value is at most 0 or above `most`."""
    for field, value in values.items():
        if not 0 < value <= most:
            raise ConfigError(f"{field} is {value}; it must be above 0 and at most {most}")


def one_of(allowed: Iterable[object], **values: object) -> None:
    """Raise ConfigError for the first field whose value is not allowed."""
    names = list(allowed)
    for field, value in values.items():
        if value not in names:
            raise ConfigError(f"{field} is {value!r}; it must be one of {', '.join(map(str, names))}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank, or its type if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unknown(field: str, value: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the closest known name as a hint."""
    names = list(known)
    return ConfigError(f"{field} is {value!r}; {hint(value, names, 'there are')}: {', '.join(names)}")


def hint(value: str, known: Iterable[str], then: str = "") -> str:
    """Return `then`, after "did you mean NAME?" if a known name is close to the value."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f"did you mean {near[0]!r}? {then[:1].upper()}{then[1:]}".rstrip() if near else then
