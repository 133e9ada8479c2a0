"""kvthaw demo: the main job on the model and the book that ship."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import load_model, stdout
from kvthaw.cli.options import budget_of, single
from kvthaw.cli.progress import Reading, waiting
from kvthaw.formatting import human, number, seconds, share

if TYPE_CHECKING:
    from rich.panel import Panel

    from kvthaw.demo import Outcome

EXAMPLES = (
    "Examples:\n\n  kvthaw demo\n\n  kvthaw demo --method icecache-digest --budget 64 --length 8192\n\n  kvthaw demo --json"
)


def demo(
    method: options.Method = "icecache-digest",
    plugin: options.Plugin = None,
    budget: options.OneBudget = "256",
    length: Annotated[
        int | None,
        typer.Option(parser=options.tokens_of, metavar="TOKENS", help="Shorten the book to so many tokens."),
    ] = None,
    model: options.Model = "shipped",
    seed: options.Seed = 0,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Answer questions about facts planted in a whole book, under a budget and with full attention.

    One prefill serves both. A table at the end compares accuracy, memory and time.
    """
    allowed = single([budget], budget_of, "--budget")
    from kvthaw.methods import resolve

    resolve(method)  # a wrong name costs no loading
    from kvthaw.demo import run

    llm, tokenizer = load_model(model, device, dtype)
    with ExitStack() as shown:
        stage = _Stage(shown, quiet=as_json)
        outcome = run(
            llm,
            tokenizer,
            method=method,
            budget=allowed,
            length=length,
            seed=seed,
            show=stage.show,
            progress=stage.read,
        )
    if as_json:
        print(json.dumps(outcome.to_dict()))
    else:
        stdout().print(card(outcome))


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
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True, **_LOOKS.get(what, {}))


_LOOKS: dict[str, dict[str, Any]] = {
    "ready": {"style": "bold"},
    "ask": {"end": " "},
    "text": {"style": "cyan", "end": ""},
    "right": {"style": "green"},
    "wrong": {"style": "red"},
}


def card(outcome: Outcome) -> Panel:
    """The two sides beside each other."""
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
        table.add_row(name, *cells)
    return Panel.fit(table, title="what it took")
