"""kvthaw methods: all methods and their options."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_wide, stdout

RECOMMENDED = ("full", "thaw", "pariskv-plus", "clusterkv-plus", "icecache-digest")
EXAMPLES = "Examples:\n\n  kvthaw methods\n\n  kvthaw methods pariskv\n\n  kvthaw methods --json"


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Tell what this one does and its options, which other commands take as in --method pariskv:rho=0.2:beta=0.1.",
            callback=options.named_method,
        ),
    ] = None,
    as_json: options.Json = False,
    plugin: options.Plugin = None,
) -> None:
    """List the methods and when to choose each, or describe one and its options.

    The recommended ones come first. A single method also shows its unit of selection, and whether its KV is dense,
    offloaded or evicted. It shows where the method selects, and whether it is graph safe: then a step needs nothing from
    the host. Bytes a key are the index's device memory for a key of head_dim 128 in bf16.
    """
    from kvthaw.evaluate.describe import describe, word
    from kvthaw.evaluate.report import lay_out
    from kvthaw.method_names import AUTO, unknown_method
    from kvthaw.methods import METHODS, resolve
    from kvthaw.methods import options as own

    if name == AUTO:
        _auto(as_json)
        return
    if name is not None and name not in METHODS:
        raise unknown_method(name, [AUTO, *METHODS])
    found = [resolve(one) for one in ([name] if name else METHODS)]
    if name is None and not as_json:
        order = {method: place for place, method in enumerate(RECOMMENDED)}
        found.sort(key=lambda method: order.get(method.name, len(order)))  # the papers' own come last
        told = [[method.name, method.paper.strip("-"), method.choose] for method in found]
        print_wide(
            lay_out(None, ["name", "paper", "choose it"], told, words=["name", "paper", "choose it"], folded=["choose it"])
        )
        print("kvthaw methods NAME tells what one does, and its options.")
        return
    rows = [describe(method) for method in found]
    if name is None:
        print(json.dumps(rows))
    elif as_json:
        print(json.dumps(rows[0] | {"text": own.text(METHODS[name]), "options": own.options(METHODS[name])}))
    else:
        takes, (row,) = own.options(METHODS[name]), rows
        for part in f"{name}: {own.text(METHODS[name])}".split("\n\n"):
            stdout().print(_paragraph(part), end="\n\n")
        stdout().print(", ".join(f"{what.replace('_', ' ')}: {word(row[what])}" for what in _FACTS) + "\n")
        for what in ("paper", "differs_from_the_paper_in", "choose_it_when"):
            if row[what] != "-":
                stdout().print(f"{what.replace('_', ' ').capitalize()}: {row[what]}\n")
        if takes:
            columns = ["option", "default", "takes"]
            lines = [[one, str(of["default"]), of["takes"]] for one, of in takes.items()]
            print_wide(lay_out(None, columns, lines, words=columns))


_FACTS = ("unit", "kv", "decides", "graph_safe", "bytes_a_key")
"""Fields of a single method that take one line."""


def _paragraph(text: str) -> str:
    """Return a docstring's paragraph with lines that the terminal may break. Explanations of arguments keep lines of their own."""
    return re.sub(r"\n(?: {4})*(?!\w+: )", " ", text)


def _auto(as_json: bool) -> None:
    """Print the method that auto chooses on each device."""
    from kvthaw.evaluate.report import lay_out
    from kvthaw.method_names import AUTO
    from kvthaw.methods.auto import BEST

    text = (
        "Full attention while its KV fits the device and that is the faster way, then an index. It takes no options; "
        "stats().method and stats().reason tell what is in force. Models with less KV a token change later on a GPU."
    )
    names = {"cuda": "other GPUs", "cpu": "a CPU"}
    columns = ["device", "full attention up to, tokens", "then", "source"]
    rows = [(names.get(on, on), best.crossing.tokens[0][1], best.method, best.crossing.source) for on, best in BEST.items()]
    if as_json:
        print(
            json.dumps(
                {"name": AUTO, "text": text, "options": {}, "by_device": [dict(zip(columns, row, strict=True)) for row in rows]}
            )
        )
        return
    print(f"{AUTO}: {text}\n")
    shown = [(on, f"{most:,}", then, source) for on, most, then, source in rows]
    title = "One sequence; on GPUs a model with 8 KV heads of 128 numbers in bf16"
    print_wide(lay_out(title, columns, shown, words=(columns[0], *columns[2:]), folded=columns[3:]))
