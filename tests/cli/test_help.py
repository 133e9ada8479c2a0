"""What the commands say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kvthaw
from kvthaw.cli import app
from lab.__main__ import app as laboratory
from lab.evaluate.published import BENCHMARKS
from lab.evaluate.tasks import TASKS
from said import Said, refused


def _commands(group: Any, *names: str) -> Iterator[list[str]]:
    """Yield the names of a group and of all commands below it."""
    yield [*names]
    for name, one in group.commands.items():
        yield from _commands(one, *names, name) if hasattr(one, "commands") else [[*names, name]]


COMMANDS = [("kvthaw", app, *command) for command in _commands(typer.main.get_command(app))]
COMMANDS += [("python -m lab", laboratory, *command) for command in _commands(typer.main.get_command(laboratory)) if command]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join([command[0], *command[2:]]))
def test_every_help_has_examples(command: tuple[Any, ...]) -> None:
    name, program, *words = command
    said = Said(*words, "--help", app=program)
    assert said.code == 0
    assert "Examples:" in said.out
    assert f"{name} {' '.join(words)}".removesuffix(" task").removesuffix(" published") in said.out


def test_commands_of_the_repository_are_pointed_to() -> None:
    for words in (("demo",), ("compare", "--task", "niah"), ("eval", "passkey"), ("bench", "prefill"), ("reproduce", "list")):
        command = " ".join(words[: 1 + (words[0] in ("eval", "bench"))])
        refused(Said(*words, app=app), 2, f"python -m lab {command}")
    assert "python -m lab" not in Said("eval", "agreemen", app=app).err
    named = CliRunner().invoke(app, ["eval", "niah"], prog_name="python -m kvthaw", env={"COLUMNS": "200"})
    assert "python -m lab eval niah" in named.stderr


def test_examples_name_methods_that_there_are() -> None:
    from kvthaw.cli import agreement, chat, generate, harness, inspect, serve
    from kvthaw.evaluate.describe import describe
    from lab.cli import compare, demo, evaluate, perplexity

    texts = [one.EXAMPLES for one in (agreement, chat, compare, demo, evaluate, generate, harness, inspect, perplexity, serve)]
    examples = " ".join(texts)
    methods = re.findall(r"--methods? (\S+)|\bmethod=([^, ]+)", examples)
    assert len(methods) > 10
    for name in {name for found in methods for text in found for name in text.split(",")} - {"", "all"}:
        describe(kvthaw.methods.resolve(name))


def test_help_lists_commands_and_exit_codes() -> None:
    said = Said("--help")
    assert all(name in said.out for name in ("generate", "methods", "eval", "bench", "130"))
    tasks, benchmarks = Said("eval", "--help", app=laboratory).out, Said("eval", "gsm8k", "--help").out
    assert all(task in tasks for task in TASKS)
    assert all(name in benchmarks for name in BENCHMARKS)


def test_help_is_as_wide_as_the_terminal() -> None:
    lines = [line.rstrip() for line in Said("eval", "perplexity", "--help").out.splitlines()]
    assert max(len(line) for line in lines if not set("│─") & set(line)) > 140, "text is not broken where the source is"


def test_version() -> None:
    assert Said("--version").out == f"kvthaw {kvthaw.__version__}\n"


def test_help_needs_no_torch() -> None:
    code = """
import runpy, sys
sys.argv = ["kvthaw", "--help"]
try:
    runpy.run_module("kvthaw", run_name="__main__")
finally:
    assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "generate" in said.stdout
