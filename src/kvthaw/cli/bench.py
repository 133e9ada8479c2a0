"""kvthaw bench: speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvthaw.cli.common import JsonOption, listed

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory.", rich_markup_mode="rich")

EXAMPLES = (
    "Examples:\n\n  kvthaw bench decode --shape llama-3.1-8b --length 36864 --method full,icecache --json\n\n"
    "  kvthaw bench decode --shape tiny --length 4096 --method full,icecache,oracle --budget 256 --out decode.jsonl"
)


@app.callback()
def _bench() -> None:
    """Measure speed and memory."""


@app.command("decode", epilog=EXAMPLES)
def decode(
    shape: Annotated[str, typer.Option(help="A model's shape; weights are random.")] = "tiny",
    length: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "4096",
    batch: Annotated[str, typer.Option(help="Rows of the batch, separated by commas.")] = "1",
    method: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "full,icecache",
    budget: Annotated[int, typer.Option(help="Most tokens attended per KV head and step.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 64,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Append one JSON line a run to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")] = None,
) -> None:
    """Time prefill and decoding on random weights, full attention beside every method."""
    lengths, rows = listed(length, int, "--length"), listed(batch, int, "--batch")
    methods = listed(method, str, "--method")
    from importlib import import_module

    import_module("kvthaw.bench.decode").main(
        shape=shape,
        length=lengths,
        batch=rows,
        method=methods,
        budget=budget,
        new_tokens=new_tokens,
        json=as_json,
        out=out,
        plot=plot,
    )
