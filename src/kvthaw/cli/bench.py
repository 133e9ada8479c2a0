"""kvthaw bench: speed and memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.bench.asked import FIGURES, Decode, Figures, Indexing, Prefill, Serving
from kvthaw.cli.common import bars, print_wide, waiting
from kvthaw.cli.options import listed
from kvthaw.cli.taking import taking

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory.", rich_markup_mode="rich")

EXAMPLES = (
    "Examples:\n\n  kvthaw bench decode --shape llama-3.1-8b --length 36864 --method full,icecache --json\n\n"
    "  kvthaw bench decode --method full,icecache,oracle --budget 256 --out decode.jsonl --plot decode.png\n\n"
    "  kvthaw bench decode --method full,clusterkv:keep=2,pariskv:retrieved=100 --prompt filled --hits 0.7"
)
FIGURES_EXAMPLES = (
    "Figures:\n\n" + "\n\n".join(f"  {name}: {what}" for name, what in FIGURES.items()) + "\n\nExamples:\n\n"
    "  kvthaw bench figures --name throughput --out throughput.jsonl --plot plots/\n\n"
    "  kvthaw bench figures --name pariskv-batches --shape tiny --shrink 64 --out tiny.jsonl\n\n"
    "  kvthaw bench figures --name length --draw --out decode.jsonl --plot docs/"
)

PREFILL_EXAMPLES = (
    "Examples:\n\n  kvthaw bench prefill --shape llama-3.1-8b --length 131072,524288 --chunk 8192,16384 --json\n\n"
    "  kvthaw bench prefill --shape tiny --length 4096 --chunk 512,1024 --method full,icecache --out prefill.jsonl"
)
INDEXING_EXAMPLES = (
    "Examples:\n\n  kvthaw bench indexing --shape llama-3.1-8b --length 32768 --method clusterkv,prkv --json\n\n"
    "  kvthaw bench indexing --shape tiny --length 2000 --method clusterkv,clusterkv:tokens_per_cluster=40 --budget 256"
)
SERVING_EXAMPLES = (
    "Examples:\n\n  kvthaw bench serving --shape llama-3.1-8b --length 16384 --method full,pariskv,prkv --budget 1024 --json\n\n"
    "  kvthaw bench serving --shape tiny --length 1000 --lanes 2 --requests 4 --method full,quest --out serving.jsonl"
)
KERNELS = {
    "pariskv": "kvthaw.bench.kernels_pariskv",
    "icecache": "kvthaw.bench.kernels_tree",
    "icecache-device": "kvthaw.bench.kernels_nodes",
    "clusterkv": "kvthaw.bench.kernels_pages",
    "prkv": "kvthaw.bench.kernels_pages",
    "quest": "kvthaw.bench.kernels_pages",
    "arkvale": "kvthaw.bench.kernels_pages",
    "decode": "kvthaw.bench.kernels_decode",
    "transfer": "kvthaw.bench.kernels_transfer",
}
"""What can be timed -> the module whose main() does it."""
ON_CPU = ("icecache",)
KERNELS_EXAMPLES = (
    "Examples:\n\n  kvthaw bench kernels --method pariskv --json\n\n"
    "  kvthaw bench kernels --method icecache --quick\n\n"
    "  kvthaw bench kernels --method clusterkv,decode --out kernels.jsonl"
)


@app.callback()
def _bench() -> None:
    """Measure speed and memory."""


@app.command("decode", epilog=EXAMPLES)
@taking(Decode)
def decode(asked: Decode, as_json: bool) -> None:
    """Time prefill and decoding on random weights, transformers' caches and full attention beside every method.

    Each method is first checked against transformers' own logits."""
    bench, report = import_module("kvthaw.bench.decode"), import_module("kvthaw.bench.report")
    report.check(asked.plot)
    with bars() as progress:
        lines = bench.main(asked, say=_printed if as_json else None, watch=_watched(progress), note=progress.console.print)
    if not as_json:
        print_wide(report.table(lines))
        print_wide(report.details(lines))


@app.command("figures", epilog=FIGURES_EXAMPLES)
@taking(Figures)
def draw(asked: Figures, as_json: bool) -> None:
    """Measure and draw the figures of the papers and of the README."""
    bench, report = import_module("kvthaw.bench.figures"), import_module("kvthaw.bench.report")
    with bars() as progress:
        found = bench.main(asked, say=_printed if as_json else None, watch=_watched(progress), note=progress.console.print)
    if not as_json:
        for lines in found.values():
            if lines:
                print_wide(report.table(lines))


@app.command("prefill", epilog=PREFILL_EXAMPLES)
@taking(Prefill)
def prefill(asked: Prefill, as_json: bool) -> None:
    """Time prompts in chunks, earlier KV streamed back from the host, beside one pass and what the hardware allows.

    Each method's logits are first checked against transformers' own of one pass."""
    bench = import_module("kvthaw.bench.prefill")
    with bars() as progress:
        lines = bench.main(asked, say=_printed if as_json else None, watch=_watched(progress))
    if not as_json:
        print_wide(bench.table(lines))


def _printed(line: Any) -> None:
    print(line.to_json(), flush=True)


def _watched(progress: Progress) -> Callable[[str, int, int], None]:
    """A bar over runs, with the one at hand. Returns what moves it."""
    task = progress.add_task("building the model", total=None)

    def watch(what: str, done: int, of: int) -> None:
        progress.update(task, description=what, completed=done, total=of)

    return watch


@app.command("indexing", epilog=INDEXING_EXAMPLES)
@taking(Indexing)
def indexing(asked: Indexing, as_json: bool) -> None:
    """Time what indexing adds to a prefill, and PRKV's refresh beside a decode step.

    Each index is made once more, alone, from the same keys, and must come to the same before a number is given.
    """
    _timed("indexing", asked, as_json, f"prefilling {asked.length:,} tokens", _indexing_table)


def _indexing_table(lines: Sequence[dict[str, Any]]) -> Table:
    """One row a method."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from kvthaw.formatting import seconds, share

    one = lines[0]
    title = f"indexing: {one['shape']}, {one['length']:,} tokens, full attention's prefill {seconds(one['prefill_full_s'])}"
    made = Table(title=title, box=SIMPLE_HEAD)
    made.add_column("method")
    for column in ("prefill", "longer by", "indexing\nalone", "of prefill", "refresh", "of a step,\namortised"):
        made.add_column(column, justify="right")
    for line in lines:
        times = (
            seconds(line["prefill_s"]),
            share(line["beside_share"]),
            seconds(line["indexing_s"]),
            share(line["indexing_share"]),
        )
        made.add_row(line["method"], *times, seconds(line.get("refresh_s")), share(line.get("refresh_share")))
    return made


@app.command("serving", epilog=SERVING_EXAMPLES)
@taking(Serving)
def serving(asked: Serving, as_json: bool) -> None:
    """Time the steps of a running batch that requests keep joining and leaving.

    Each method is first checked: a request in company must get the tokens that it gets alone.
    """
    doing = f"serving {asked.requests} requests of up to {asked.length:,} tokens"
    _timed("serving", asked, as_json, doing, _serving_table)


def _timed(name: str, asked: Any, as_json: bool, doing: str, table: Callable[[Sequence[dict[str, Any]]], Table]) -> None:
    """Run a benchmark that prints its lines, or show them as a table when it is done."""
    main = import_module(f"kvthaw.bench.{name}").main
    if as_json:
        main(asked)
        return
    with waiting(doing):
        lines = main(asked, quiet=True)
    print_wide(table(lines))


def _serving_table(lines: Sequence[dict[str, Any]]) -> Table:
    """One row a method."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    one = lines[0]
    made = Table(title=f"serving: {one['shape']}, {one['length']:,} tokens, {one['lanes']} lanes", box=SIMPLE_HEAD)
    made.add_column("method")
    for column in ("step p50", "mean", "p95", "most", "join", "tokens/s", "captures"):
        made.add_column(column, justify="right")
    for line in lines:
        times = [f"{line[name]:.1f} ms" for name in ("step_ms_p50", "step_ms_mean", "step_ms_p95", "step_ms_max")]
        rest = (f"{line['join_s_p50']:.2f} s", f"{line['tokens_per_s']:.1f}", str(line["captures"]))
        made.add_row(line["method"], *times, *rest)
    return made


@app.command("kernels", epilog=KERNELS_EXAMPLES)
def kernels(
    method: Annotated[
        str,
        typer.Option(
            help=f"What to time, separated by commas: {', '.join(KERNELS)}. clusterkv, prkv, quest and arkvale share one. "
            "decode is attention, residency and fetching; transfer is pages as NHD and as HND, one by one and batched, beside rows "
            "in the order of tokens. icecache's search runs on the CPU, the others need a GPU."
        ),
    ] = "pariskv",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a case, as it comes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append one JSON line a case to this file.")] = None,
) -> None:
    """Check each kernel against its definition, then time it."""
    names = listed(method, str, "--method")
    for name in names:
        if name not in KERNELS:
            raise typer.BadParameter(f"{name!r} has no kernels; there are: {', '.join(KERNELS)}", param_hint="--method")
    import torch

    without = [name for name in names if name not in ON_CPU]
    if without and not torch.cuda.is_available():
        problem = f"timing the kernels of {', '.join(without)} needs a CUDA device, and torch finds none"
        raise typer.BadParameter(f"{problem}; on the CPU there is: {', '.join(ON_CPU)}", param_hint="--method")
    lines: list[dict[str, Any]] = []
    for module in dict.fromkeys(KERNELS[name] for name in names):
        run = import_module(module).main
        if as_json:
            run(quick=quick, out=out)
            continue
        with waiting(f"checking and timing, {module.rpartition('_')[2]}"), redirect_stdout(io.StringIO()):  # its JSON lines
            lines += run(quick=quick, out=out)
    if not as_json:
        print_wide(_table(lines))


def _table(lines: Sequence[dict[str, Any]]) -> Table:
    """One row a case: what it is, and what was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=f"kernels on {lines[0]['gpu'] or lines[0]['cpu']}, commit {lines[0]['commit']}", box=SIMPLE_HEAD)
    for column in ("what", "case", "measured"):
        made.add_column(column)
    about = {"bench", "op", "gpu", "cpu", "torch", "transformers", "triton", "python", "commit"}
    for line in lines:
        rest = {name: value for name, value in line.items() if name not in about and not isinstance(value, dict)}
        measured = {name: value for name, value in rest.items() if isinstance(value, float)}
        case = " ".join(f"{name}={value}" for name, value in rest.items() if name not in measured)
        made.add_row(line.get("op", line["bench"]), case, " ".join(f"{name}={value:.4g}" for name, value in measured.items()))
    return made
