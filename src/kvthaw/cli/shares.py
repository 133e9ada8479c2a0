"""kvthaw eval shares: PRKV's automatic static share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli import options
from kvthaw.cli.common import bars, load_model, print_results, shown
from kvthaw.cli.options import listed, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvthaw.evaluate.shares import Cell

EXAMPLES = (
    "Examples:\n\n  kvthaw eval shares --length 4096,16384 --rows 256,512,1024\n\n"
    "  kvthaw eval shares --model meta-llama/Llama-3.1-8B --length 32768 --rows 512,1024,2048,4096 --samples 8 --json"
)


def shares(
    model: options.Model = "shipped",
    length: Annotated[str, options.LENGTHS] = "4096,8192",
    rows: Annotated[
        str, typer.Option(help="The budget k: tokens that the index brings, separated by commas.")
    ] = "256,512,1024",
    prompt: Annotated[
        str, typer.Option(help="[bold]text[/], [bold]needle[/], separated by commas; as for recall.")
    ] = "text,needle",
    text: options.Text = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each kind and length.")] = 1,
    page: Annotated[int, typer.Option(min=1, help="Tokens of a page, of which the static set is a multiple.")] = 32,
    window: Annotated[int, typer.Option(min=1, help="The last tokens: the observation window, at most 128 queries.")] = 64,
    dense_layers: Annotated[
        int | None, typer.Option(min=0, help="First layers that keep all KV; by default 2 from 16 layers on, else 0.")
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Print what share of its rows PRKV keeps static when it chooses by itself (prkv:share=auto, appendix G, table 4).

    The share is how much of the k most attended tokens the first and the last query of the prompt's observation window have in
    common, in whole pages: averaged over heads, layers and prompts.
    """
    from kvthaw.evaluate.results import Kept
    from kvthaw.evaluate.shares import Line
    from kvthaw.evaluate.shares import shares as measure

    lengths, ks = listed(length, int, "--length"), listed(rows, int, "--rows")
    kinds = listed(prompt, str, "--prompt")
    known = Kept(out, Line.from_json)
    llm, tokenizer = load_model(model, device, dtype)
    with bars() as progress:
        cells = measure(
            llm, tokenizer, lengths=lengths, rows=ks, kinds=kinds, samples=samples, seed=seed, page=page, window=window,  # type: ignore[arg-type]
            dense_layers=dense_layers, text=words(text), known=known, name=model, progress=shown(progress, "prompts", len(lengths)),
        )  # fmt: skip
    print_results((cell.to_dict() for cell in cells), as_json, lambda: [_table(cells, lengths, ks)])


def _table(cells: Sequence[Cell], lengths: Sequence[int], rows: Sequence[int]) -> Table:
    """A row for each number of rows, a column for each length."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    one = cells[0].lines[0].setting
    prompts = f"{len(cells[0].lines)} prompt{'s' * (len(cells[0].lines) > 1)}"
    title = f"automatic static share S: {one.model}, pages of {one.page}, window {one.window}, {prompts} a cell"
    made = Table(title=title, box=SIMPLE_HEAD)
    made.add_column("rows k", justify="right")
    for length in lengths:
        made.add_column(f"{length:,} tokens", justify="right")
    by = {(cell.length, cell.rows): cell for cell in cells}
    for k in rows:
        made.add_row(f"{k:,}", *(f"{by[length, k].share:.3f}" for length in lengths))
    return made
