"""python -m lab bench: speed and memory of models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.bench.shapes import SHAPES
from kvthaw.cli import bench, options
from kvthaw.cli.common import print_wide
from kvthaw.cli.options import budget_of, dense_of, host_bytes_of, listed, names_of, one_budget, single, tokens_of
from kvthaw.cli.progress import bars, watched
from kvthaw.evaluate.results import Record
from lab.cli.options import Lengths, save_plot

EXAMPLES = (
    "Examples:\n\n"
    "  python -m lab bench decode --shape llama-3.1-8b --length 36864 --method full,icecache-digest --json\n\n"
    "  python -m lab bench decode --method full,icecache-digest,oracle --budget 256 --out decode.jsonl --plot decode.png\n\n"
    "  python -m lab bench decode --method full,clusterkv:keep=2:budget=1024,pariskv:retrieved=100\n\n"
    "  torchrun --nproc-per-node 2 -m lab bench decode --tp 2 --shape llama-3.1-8b --length 131072 --method pariskv"
)
PREFILL_EXAMPLES = (
    "Examples:\n\n  python -m lab bench prefill --shape llama-3.1-8b --length 131072,524288 --chunk 8192,16384 --json\n\n"
    "  python -m lab bench prefill --shape tiny --length 4096 --chunk 512,1024 --method full,icecache-digest --out prefill.jsonl"
)
SERVING_EXAMPLES = (
    "Examples:\n\n  python -m lab bench serving --shape llama-3.1-8b --length 16384 --method full,pariskv-plus --budget 1024 "
    "--json\n\n"
    "  python -m lab bench serving --shape tiny --length 1000 --max-seqs 2 --requests 4 --method full,thaw --out serving.jsonl"
)
app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory with random weights.",
    rich_markup_mode="rich",
    epilog="Examples:\n\n  python -m lab bench decode --shape llama-3.1-8b --length 128k\n\n"
    "  python -m lab bench prefill --shape llama-3.1-8b --length 128k\n\n"
    "  python -m lab bench serving --shape llama-3.1-8b --length 16k --max-seqs 16",
)
_TIMED, _SERVED = ["hf-dynamic", "full", "icecache-digest"], ["full", "pariskv-plus"]
_CHUNK = ["1024"]
Shape = Annotated[str, typer.Option(help=f"The model's shape, with random weights: {', '.join(SHAPES)}.")]
Commit = Annotated[str | None, typer.Option(help="The commit to write into the results. Default: git's.")]


@app.callback()
def _bench() -> None:
    """Measure speed and memory with random weights."""


@app.command("decode", epilog=EXAMPLES)
def decode(
    shape: Shape = "tiny",
    length: Lengths = options.LENGTH,
    batch: bench.Batches = bench.ONE,
    method: Annotated[list[str], bench.METHODS] = _TIMED,
    plugin: options.Plugin = None,
    budget: options.OneBudget = "256",
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "auto",
    steps: bench.Steps = bench.STEPS,
    new_tokens: bench.NewTokens = 64,
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="Split the model by heads over this number of processes, which torchrun starts; bytes are of one."
        ),
    ] = 1,
    host_memory: options.HostMemory = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time per output token and throughput into this PNG file.")] = None,
    commit: Commit = None,
    device: options.Device = None,
) -> None:
    """Time prefill and decoding of every method, of full attention and of transformers' caches.

    Each method's logits are first checked against transformers'.
    """
    names, lengths = names_of(method), listed(length, tokens_of, "--length")
    batches, ways = listed(batch, int, "--batch"), listed(steps, str, "--steps")
    limit: dict[str, Any] = {"budget": one_budget(budget), "retrieved": retrieved, "dense_layers": dense_of(dense_layers)}
    from kvthaw.bench import tables
    from kvthaw.evaluate.machine import where
    from kvthaw.evaluate.results import ResultsFile
    from lab.bench.settings import grid
    from lab.bench.shaped import ShapeBench
    from lab.evaluate.plot import check, decode_lines
    from lab.torchrun import processes

    check(plot)
    known, on = ResultsFile(out), where(device)[1]
    limit |= {"new_tokens": new_tokens, "seed": seed, "device": on if tp == 1 else f"{tp} x {on}"}
    if plot is not None and not {"full", "hf-dynamic"} & set(names):
        names = ["full", *names]  # what every plot compares with
    wanted = grid(names, lengths, batches, ways, shape=shape, **limit)
    with processes(tp) as rank, bars() as progress:
        progress.console.quiet = rank > 0
        watch = watched(progress, "building the model")
        how: dict[str, Any] = {"say": _said(as_json and rank == 0), "watch": watch, "note": progress.console.print}
        how |= {"commit": commit, "host_bytes": host_bytes_of(host_memory), "tp": tp, "device": device}
        timed = ShapeBench(known, **how)
        records = timed.run(wanted)
    if rank == 0:
        save_plot(plot, lambda path: decode_lines(records, path))
        for each in tables.decode(records) if records and not as_json else ():
            print_wide(each)
    timed.judge()


@app.command("prefill", epilog=PREFILL_EXAMPLES)
def prefill(
    shape: Shape = "tiny",
    length: Lengths = options.LENGTH,
    chunk: Annotated[
        list[str], typer.Option(help=f"Tokens of a chunk; {options.SEVERAL}. One pass is always timed, too.")
    ] = _CHUNK,
    method: options.Methods = options.DIGEST,
    plugin: options.Plugin = None,
    budget: options.OneBudget = "1024",
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "0",
    chunks_only: Annotated[
        bool, typer.Option("--chunks-only", help="Time chunks only, neither one pass nor transformers.")
    ] = False,
    host_memory: options.HostMemory = None,
    as_json: options.Lines = False,
    out: options.Out = None,
    commit: Commit = None,
) -> None:
    """Time the prefill of a prompt in chunks, which stream earlier KV back from the host, and in one pass.

    First each method's logits are checked against transformers' logits from one pass.
    """
    lengths, chunks = listed(length, tokens_of, "--length"), listed(chunk, tokens_of, "--chunk")
    names = names_of(method)
    from kvthaw.evaluate.results import ResultsFile
    from lab.bench import tables
    from lab.bench.prefill import grid, run

    sizes = {"budget": one_budget(budget), "retrieved": retrieved, "dense_layers": dense_of(dense_layers) or 0}
    wanted = grid(shape, names, lengths, chunks, chunks_only=chunks_only, **sizes)  # type: ignore[arg-type]
    with bars() as progress:
        say, watch = _said(as_json), watched(progress, "building the model")
        records = run(wanted, ResultsFile(out), host_bytes=host_bytes_of(host_memory), commit=commit, say=say, watch=watch)
    if not as_json:
        print_wide(tables.prefill(records))


@app.command("serving", epilog=SERVING_EXAMPLES)
def serving(
    shape: Shape = "tiny",
    length: Annotated[
        int,
        typer.Option(
            parser=options.tokens_of, metavar="TOKENS", help="Tokens of the longest prompt; the shortest has half as many."
        ),
    ] = 2048,
    max_seqs: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests in total.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each request.")] = 64,
    method: options.Methods = _SERVED,
    plugin: options.Plugin = None,
    budget: options.OneBudget = "256",
    device_memory: options.DeviceMemory = None,
    as_json: options.Lines = False,
    out: options.Out = None,
    commit: Commit = None,
) -> None:
    """Time the steps of a running batch while requests join and leave.

    First each method is checked: a request in the batch must get the tokens that it gets alone.
    """
    names = names_of(method)
    from kvthaw.evaluate.results import ResultsFile
    from lab.bench import tables
    from lab.bench.serving import Serving, run

    sizes: dict[str, Any] = {"length": length, "max_seqs": max_seqs, "requests": requests, "new_tokens": new_tokens}
    limits: dict[str, Any] = {"budget": single([budget], budget_of, "--budget"), "device_memory": device_memory}
    asked = Serving(shape=shape, **limits, **sizes)
    with bars() as progress:
        watch = watched(progress, "building the model")
        records = run(asked, names, ResultsFile(out), commit=commit, say=_said(as_json), watch=watch)
    if not as_json:
        print_wide(tables.serving(records))


def _said(as_json: bool) -> Callable[[Record], None]:
    return lambda record: print(record.to_json(), flush=True) if as_json else None
