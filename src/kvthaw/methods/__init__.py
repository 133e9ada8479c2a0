"""The methods: one file each, one line each in METHODS."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.methods.arkvale import arkvale
from kvthaw.methods.clusterkv import clusterkv
from kvthaw.methods.freekv import freekv
from kvthaw.methods.full import full
from kvthaw.methods.h2o import h2o
from kvthaw.methods.icecache import icecache
from kvthaw.methods.infinigen import infinigen
from kvthaw.methods.magicpig import magicpig
from kvthaw.methods.omnikv import omnikv
from kvthaw.methods.oracle import oracle
from kvthaw.methods.pariskv import pariskv
from kvthaw.methods.pqcache import pqcache
from kvthaw.methods.prkv import prkv
from kvthaw.methods.quest import quest
from kvthaw.methods.retroinfer import retroinfer
from kvthaw.methods.shadowkv import shadowkv
from kvthaw.methods.snapkv import snapkv
from kvthaw.methods.socket import socket
from kvthaw.methods.streaming import streaming
from kvthaw.methods.twilight import twilight
from kvthaw.types import Method

METHODS: dict[str, Callable[..., Method]] = {
    "full": full,
    "oracle": oracle,
    "streaming": streaming,
    "h2o": h2o,
    "snapkv": snapkv,
    "snapkv-refreshed": partial(snapkv, refresh=128),
    "clusterkv": clusterkv,
    "prkv": prkv,
    "arkvale": arkvale,
    "quest": quest,
    "icecache": icecache,
    "icecache-reuse": partial(icecache, reuse=3),
    "icecache-device": partial(icecache, search="device"),
    "pariskv": pariskv,
    "pqcache": pqcache,
    "magicpig": magicpig,
    "omnikv": omnikv,
    "freekv": freekv,
    "twilight": twilight,
    "shadowkv": shadowkv,
    "retroinfer": retroinfer,
    "infinigen": infinigen,
    "socket": socket,
}
"""Name -> what makes the Method from its options. The only list of methods."""


def resolve(method: str | Method, **options: Any) -> Method:
    """A Method by name, with options, or as it is. Options may stand in the name: "icecache:promote=0.1:merge=union".

    Raises ConfigError, naming the nearest, for a name that is not in METHODS."""
    if isinstance(method, Method):
        if options:
            raise ConfigError(f"options {sorted(options)} go with a method's name; this is the finished method {method.name}")
        return method
    method, *written = method.split(":")
    options = {**dict(_option(text) for text in written), **options}
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"method is {method!r}; {hint}There are: {', '.join(METHODS)}")
    try:
        return METHODS[method](**options)
    except TypeError as error:
        raise ConfigError(f"method {method!r}: {error}") from None


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word
        return name, value
