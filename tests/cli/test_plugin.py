"""Own methods on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvthaw import METHODS
from kvthaw.cli import app
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from said import Said, refused

EXAMPLE = str(Path(__file__).parents[2] / "examples/own_method.py")


@pytest.fixture(autouse=True)
def _unregister() -> Iterator[None]:
    yield
    if "sign-keys" in METHODS:
        METHODS.unregister("sign-keys")


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below a group, by its words."""
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            yield f"{path} {name}".strip(), command


def test_every_command_that_takes_a_method_takes_a_plugin() -> None:
    takes = {name: {one.name for one in command.params} for name, command in commands(typer.main.get_command(app))}
    assert len(takes) > 8
    asked = {name for name, options in takes.items() if options & {"method", "methods"}} | {"methods", "lm-eval"}
    assert [name for name in sorted(asked) if "plugin" not in takes[name]] == []


def test_a_file_s_method_generates_and_is_described(model: str) -> None:
    (told,) = Said("methods", "sign-keys", "--plugin", EXAMPLE, "--json").records
    assert told["decides"] == "device"
    said = Said(
        *("generate", "1234567890" * 8, "--model", model, "--plugin", EXAMPLE, "--method", "sign-keys:sink=2"),
        *("--budget", "32", "--max-new-tokens", "2", "--json"),
    )
    assert json.loads(said.out)["method"].startswith("sign-keys")


def test_a_method_without_its_file_is_unknown(model: str) -> None:
    """The command names the option that would add it, which Python's callers do not have."""
    for command in (("generate", "hi", "--model", model, "--method", "sign-keys"), ("methods", "sign-keys")):
        refused(Said(*command), 1, "sign-keys", "--plugin FILE.PY adds the methods of a file")
    with pytest.raises(ConfigError, match=r"sign-keys(?!.*plugin)"):
        resolve("sign-keys")


def test_a_baseline_comes_by_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.methods.METHODS", {})
    monkeypatch.setattr("kvthaw.cli.options.entry_points", lambda **_: [])
    said = Said("methods", "quest")
    refused(said, 1, "a baseline, which is not installed")
    assert "plugin" not in said.err


def test_a_file_without_methods_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "plain.py").write_text("x = 1\n")
    refused(Said("generate", "hi", "--model", model, "--plugin", str(tmp_path / "plain.py")), 1, "plain.py has no METHODS")
