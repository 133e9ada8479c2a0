"""Commands whose options are the fields of a dataclass of `kvthaw.bench.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar

import typer

from kvthaw.bench.options import FLAG, about, read, shown
from kvthaw.cli import options
from kvthaw.errors import ConfigError

T = TypeVar("T")


def taking(kind: type[T]) -> Callable[[Callable[[T, bool], None]], Callable[..., None]]:
    """Make a command of a function that is given options of that class and whether JSON is wanted. An option's text is read by its
    field's reader; what that refuses is a usage error."""

    def decorate(command: Callable[[T, bool], None]) -> Callable[..., None]:
        def run(as_json: bool, **given: Any) -> None:
            written = {name: value if isinstance(value, str) else "1" for name, value in given.items() if value}
            try:
                asked = read(kind, written)
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from None
            command(asked, as_json)

        parameters = [_parameter(one) for one in fields(kind)]  # type: ignore[arg-type]
        parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=options.Json))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        return run

    return decorate


def _parameter(one: Field[Any]) -> inspect.Parameter:
    """A field as a parameter that typer makes an option of."""
    flag, option = one.metadata["reader"] is FLAG, typer.Option(f"--{one.name.replace('_', '-')}", help=about(one))
    kind: Any = Annotated[bool, option] if flag else Annotated[str | None, option]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=False if flag else shown(one), annotation=kind)
