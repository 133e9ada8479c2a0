"""kvthaw demo: the main job on the model and the book that ship."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli.common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SeedOption,
    bars,
    human,
    load_model,
    number,
    one_budget,
    seconds,
    share,
    stdout,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

    from kvthaw.demo import Event, Outcome

EXAMPLES = "Examples:\n\n  kvthaw demo\n\n  kvthaw demo --method icecache --budget 64 --length 8192\n\n  kvthaw demo --json"


def demo(
    method: Annotated[str, typer.Option(help="A name of [bold]kvthaw methods[/].")] = "icecache",
    budget: Annotated[str, typer.Option(help="Most tokens attended per KV head and step, or a fraction of the book.")] = "256",
    length: Annotated[int | None, typer.Option(min=1, help="Cut the book to so many tokens.")] = None,
    model: ModelOption = "shipped",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Ask a whole book for facts planted in it, under a budget and with full attention.

    One prefill serves both. Then a card says what each of them read, held and took.
    """
    allowed = one_budget(budget)
    assert allowed is not None
    from kvthaw.demo import run
    from kvthaw.methods import resolve

    resolve(method)
    llm, tokenizer = load_model(model, device, dtype)
    console = stdout()
    with bars() as progress:
        task = progress.add_task("reading the book", total=None)

        def move(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=done < total)

        outcome = run(
            llm,
            tokenizer,
            method=method,
            budget=allowed,
            length=length,
            seed=seed,
            show=(lambda event: None) if as_json else (lambda event: _show(console, event)),
            progress=move,
        )
    if as_json:
        print(json.dumps(outcome.to_dict()))
    else:
        console.print(card(outcome))


def _show(console: Console, event: Event) -> None:
    side, question = event.side, event.question
    assert side is not None
    if event.what == "index":
        console.print(f"\n[bold]{side.method}[/]")
    elif event.what == "ask" and question is not None:
        asked = question.text.strip().split("?")[0] + "?"
        console.print(f"  [dim]{100 * question.depth:3.0f} %[/] {asked}", end="", highlight=False, soft_wrap=True)
    elif event.what == "text":
        console.print(event.text, end="", style="cyan", highlight=False, markup=False, soft_wrap=True)
    elif event.what == "answer" and question is not None:
        right = side.right[-1]
        console.print("  [green]right[/]" if right else f"  [red]wrong[/], it is {question.answer}", highlight=False)


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
