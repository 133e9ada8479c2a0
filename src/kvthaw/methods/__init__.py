"""The methods: one file each, listed in `kvthaw.method_names.OWN`. Those of other papers are the package kvthaw-baselines."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, get_args

from kvthaw.cache.index_api import Method
from kvthaw.config import KvDtype
from kvthaw.errors import ConfigError, one_of
from kvthaw.method_names import OWN, unknown_method
from kvthaw.methods.options import REGIONS, check, written
from kvthaw.methods.registry import Methods
from kvthaw.methods.remainder import with_remainder
from kvthaw.typecheck import check_type


def resolve(method: str | Method, **options: Any) -> Method:
    """Return a Method by name, with options; a Method is returned unchanged. The name may contain options:
    "icecache:promote=0.1:merge=union".

    Every method that retrieves also takes sink, window and buffer, in tokens, instead of its own regions. Every method
    takes kv_dtype. A method whose index is on the device takes remainder, the tokens of a page. On a CPU every index counts
    as such. The unselected tokens are then estimated from the mean key and the mean value of each page
    (`kvthaw.index.remainder`); 0: they are left out.

    Raises ConfigError for a name that is not in METHODS, naming the nearest, and for options that the method does not take.
    """
    if isinstance(method, Method):
        if options:
            raise ConfigError(f"options {sorted(options)} go with a method's name; this is the finished method {method.name}")
        return method
    if not isinstance(method, str):
        hint = f"; call it, {getattr(method, '__name__', 'method')}(), to make one" if callable(method) else ""
        raise ConfigError(f"method is {method!r}; it must be a name in METHODS or a Method{hint}")
    method, *texts = method.split(":")
    options = {**dict(written(text) for text in texts), **options}
    make, kv_dtype = METHODS.get(method), options.pop("kv_dtype", None)
    if make is None:
        raise unknown_method(method, METHODS)
    if kv_dtype is not None:
        one_of(get_args(KvDtype), kv_dtype=kv_dtype)
    page = 0 if "remainder" in signature(make).parameters else options.pop("remainder", 0)
    regions = {name: options.pop(name) for name in REGIONS if name in options and name not in signature(make).parameters}
    check(method, options, make)
    check_type(int, remainder=page, **regions)
    made = make(**options)
    if not isinstance(made, Method):
        raise ConfigError(f"method {method} made {made!r}; its function must return a kvthaw.Method")
    if regions and made.index is None:
        raise ConfigError(f"method {method} retrieves nothing; it has no option {next(iter(regions))!r}")
    made = with_remainder(made, page)
    return replace(made, name=method, regions=replace(made.regions, **regions), kv_dtype=kv_dtype or made.kv_dtype)


METHODS = Methods({name: f"kvthaw.methods.{where}" for name, where in OWN.items()})
"""Name -> the function that makes the Method from its options. A method's module is imported when the method is asked for."""
