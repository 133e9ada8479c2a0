"""The command lines, as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from typer.testing import CliRunner

from kvthaw.cli import LABORATORY, app
from lab.__main__ import app as laboratory


def program(words: Sequence[str]) -> typer.Typer:
    """Return the program that has a command: kvthaw, or python -m lab."""
    words = list(words)
    task = words[:1] == ["eval"] and words[1:2] not in (["agreement"], ["--help"])
    return laboratory if task or " ".join(words).startswith(LABORATORY) else app


class Said:
    """What a command said.

    app: the program; None: the one that has the command.
    """

    def __init__(
        self, *arguments: str, stdin: str | bytes | None = None, columns: int = 200, app: typer.Typer | None = None
    ) -> None:
        called = app or program(arguments)
        result = CliRunner().invoke(called, list(arguments), input=stdin, env={"COLUMNS": str(columns), "NO_COLOR": "1"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def records(self) -> list[Any]:
        """stdout, which must be JSON line by line."""
        return [json.loads(line) for line in self.out.splitlines()]


def refused(said: Said, code: int, *words: str) -> None:
    """One readable line on stderr, nothing on stdout."""
    assert said.code == code
    assert said.out == ""
    assert all(word in said.err for word in words), said.err
    assert "Traceback" not in said.err
    if code == 1:
        assert len(said.err.strip().splitlines()) == 1
