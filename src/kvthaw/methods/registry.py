"""Methods by name: kvthaw's own, a program's registered ones, and the ones of installed packages."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from kvthaw.cache.index_api import Method
from kvthaw.errors import ConfigError
from kvthaw.method_names import AUTO, BASELINES, GROUP

Make = Callable[..., Method]


class Methods(Mapping[str, Make]):
    """Name -> the function that makes a Method from its options.

    Packages are asked once: when a name is not found here, or all names are listed. A method's module is imported when the method
    is asked for; a package's that cannot be imported raises ConfigError.

    own: name -> "module:function".
    """

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = {name: EntryPoint(name, where, GROUP) for name, where in own.items()}
        self._registered = dict[str, Make]()

    def register(self, name: str, make: Make) -> None:
        """Register a method under `name`, with a function that makes it: `def mine(*, sink: int = 4) -> kvthaw.Method`.

        A second registration replaces the first. Raises ConfigError for kvthaw's own names, for a name that could be read
        as options, and for anything but a function.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name in (AUTO, "all"):
            raise ConfigError(
                f"name is {name!r}; a method's name has letters, digits, '-', '_' and '.', and is not auto or all"
            )
        if name in self._own or name in BASELINES:
            raise ConfigError(f"name is {name!r}, which is a method of kvthaw's own")
        if not callable(make):
            raise ConfigError(f"method {name} is {make!r}; it must be a function that returns a kvthaw.Method")
        self._registered[name] = make

    def unregister(self, name: str) -> None:
        """Undo register()."""
        del self._registered[name]

    def load_plugin(self, path: Path | str) -> list[str]:
        """Run a Python file and register each method of its METHODS, {name: function}. Returns their names."""
        path = Path(path)
        spec = importlib.util.spec_from_file_location(f"kvthaw_plugin_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"plugin is {str(path)!r}; it must be a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for their annotations
        spec.loader.exec_module(module)
        found = getattr(module, "METHODS", None)
        if not isinstance(found, dict) or not found:
            raise ConfigError(f'plugin {path} has no METHODS = {{"name": function}}, so it adds no method')
        for name, make in found.items():
            self.register(name, make)
        return list(found)

    def __getitem__(self, name: str) -> Make:
        if name in self._own:
            own: Make = self._own[name].load()
            return own
        return self._registered[name] if name in self._registered else _load(self._packaged[name])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *self._registered, *self._packaged)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @cached_property
    def _packaged(self) -> dict[str, EntryPoint]:
        found = dict[str, EntryPoint]()
        for point in entry_points(group=GROUP):
            if point.name in self._own or found.setdefault(point.name, point).value != point.value:
                raise ConfigError(f"method {point.name} of {_package(point)} has the name of another method")
        return found


def _load(point: EntryPoint) -> Make:
    try:
        make: Make = point.load()
    except Exception as error:
        raise ConfigError(f"method {point.name} of {_package(point)} cannot be loaded from {point.value}: {error}") from error
    return make


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "a package"
