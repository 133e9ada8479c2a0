"""Options mean the same under every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from kvthaw.cli import app
from kvthaw.cli.options import VariantOptions, budget_of, listed, tokens_of
from said import Said, refused

OWN = ("--data", "--question", "--context")
"""What is a text to ask, or a name, where one prompt is answered, and a way to ask, or a file, where there are many."""


def commands(command: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something."""
    command = command or typer.main.get_command(app)
    below = getattr(command, "commands", {})
    for word, one in below.items():
        yield from commands(one, f"{name} {word}".strip())
    if not below:
        yield name, command


def test_an_option_takes_a_list_under_all_commands_that_take_several() -> None:
    """Where two commands have an option of the same name, its values look the same."""
    looks: dict[str, dict[str | None, str]] = {}
    for name, command in commands():
        for param in command.params:
            for option in (one for one in param.opts if one.startswith("--") and one not in OWN):
                looks.setdefault(option, {})[param.metavar] = name
    assert {option: found for option, found in looks.items() if len(found) > 1} == {}


def test_lists_are_separated_by_commas_or_repeated() -> None:
    assert listed(["64,128", "0.5"], budget_of, "--budget") == [64, 128, 0.5]
    assert listed(["1k", "2K, 1024", "300"], tokens_of, "--length") == [1024, 2048, 300]
    by_commas = VariantOptions(["oracle,quest:budget=64"], None, ["64,128"], ["16,32"], ["0,1"]).variants()
    repeated = VariantOptions(["oracle", "quest:budget=64"], None, ["64", "128"], ["16", "32"], ["0", "1"])
    assert by_commas == repeated.variants()
    assert (
        VariantOptions(["oracle"], dense_layers=["auto"]).variants() == VariantOptions(["oracle"], budget=["1024"]).variants()
    )
    for wrong in ("0", "-1k", "k", "4m"):
        with pytest.raises(typer.BadParameter):
            listed([wrong], tokens_of, "--length")


def test_a_length_that_is_no_number_is_refused_in_words(model: str) -> None:
    for given in ("1M", "many"):
        refused(Said("serve", model, "--max-len", given), 2, f"'{given}' is not a number of tokens, such as 4096 or 128k")
    refused(Said("serve", model, "--max-len", "0"), 2, "0 is too small; it must be from 1 to")


def test_what_takes_one_value_refuses_several(model: str) -> None:
    refused(Said("chat", "--model", model, "--budget", "64,128"), 2, "--budget", "several values")
    refused(Said("serve", model, "--model", model), 2, "one of them is enough")
    refused(Said("eval", "passkey", "--question", "dense,both"), 2, "--question", "'both'")
