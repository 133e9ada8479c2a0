"""kvthaw bench: the speed of a model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_wide, stdout
from kvthaw.cli.options import (
    ModelOptions,
    dense_of,
    file_option,
    flat,
    host_bytes_of,
    listed,
    names_of,
    one_budget,
    option,
    tokens_of,
    words,
)
from kvthaw.cli.progress import bars, stderr, watched

EXAMPLES = (
    "Examples:\n\n  kvthaw bench decode --model ./my-model --file book.txt\n\n"
    "  kvthaw bench decode --model Qwen/Qwen3-8B --length 8k,32k --method thaw,pariskv-plus --budget 1024 --out decode.jsonl\n\n"
    "  kvthaw bench decode --method clusterkv:keep=2:budget=1024,pariskv:retrieved=100 --json"
)
ONE, STEPS = ["1"], ["eager", "captured"]
Batches = Annotated[list[str], typer.Option("--batch", help=f"Rows of the batch; {options.SEVERAL}.")]
METHODS = typer.Option(
    "--method",
    help="Methods, separated by commas or one by one. Options follow behind colons, a method's and its cache's: "
    "clusterkv:keep=2, pariskv:retrieved=100, icecache-digest:budget=256:new_tokens=64. hf-dynamic and hf-offloaded are "
    "transformers' own caches.",
)
Steps = Annotated[
    list[str],
    typer.Option(
        "--steps",
        help=f"How to run steps: eager, or captured in CUDA graphs; {options.SEVERAL}. Ways that a device or a method cannot run "
        "are left out.",
    ),
]
NewTokens = Annotated[int, typer.Option("--new-tokens", min=2, help="Tokens to decode and time.")]


@flat
def decode(
    loading: ModelOptions,
    file: Path | None = file_option("The prompt is this text, which starts over at its end. Default: the book that ships."),
    length: list[str] | None = option(
        f"Tokens of the prompt, such as 4096 or 128k; {options.SEVERAL}. Default 4096, or all of --file.", metavar="TOKENS"
    ),
    batch: Batches = ONE,
    method: Annotated[list[str] | None, METHODS] = None,
    plugin: options.Plugin = None,
    budget: options.OneBudget = "256",
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "auto",
    steps: Steps = STEPS,
    new_tokens: NewTokens = 64,
    host_memory: options.HostMemory = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
) -> None:
    """Time prefill and decoding of your model under every method, full attention and transformers' caches.

    All of them get the same tokens of your own prompt. A recommendation ends the report. Full attention and transformers'
    caches are always timed; without --method also the best on the device for long contexts. Random weights of a model's
    shape are timed in kvthaw's repository: python -m lab bench decode --help.
    """
    lengths = listed(length or options.LENGTH, tokens_of, "--length")
    batches, ways = listed(batch, int, "--batch"), listed(steps, str, "--steps")
    limit: dict[str, Any] = {"budget": one_budget(budget), "retrieved": retrieved, "dense_layers": dense_of(dense_layers)}
    from kvthaw.bench.settings import caches
    from kvthaw.methods.auto import check_settings, find

    host_bytes = host_bytes_of(host_memory)
    asked = caches(names_of(method or ()), **limit, host_bytes=host_bytes)
    for one, settings in asked:
        check_settings(one, settings)  # what is wrong costs no loading
    from kvthaw.bench import tables
    from kvthaw.bench.own import OwnBench, Reading, advice
    from kvthaw.engine.hub import display_name
    from kvthaw.evaluate.machine import where
    from kvthaw.evaluate.results import ResultsFile

    known = ResultsFile(out)
    llm, tokenizer = loading.load(asked)
    reading = Reading(llm, tokenizer, display_name(loading.model), words(file))
    if file is not None and length is None:
        lengths = [len(reading.ids())]
    names = names_of(method or [find("auto", llm.device).name])
    limit |= {"new_tokens": new_tokens, "seed": seed, "device": where(loading.device)[1]}
    wanted = reading.grid(names, lengths, batches, ways, **limit)
    with bars() as progress:
        how: dict[str, Any] = {
            "watch": watched(progress, "beginning"),
            "note": progress.console.print,
            "device": loading.device,
        }
        if as_json:
            how["say"] = lambda record: print(record.to_json(), flush=True)
        bench = OwnBench(reading, known, **how, host_bytes=host_bytes)
        records = bench.run(wanted)
    for each in tables.decode(records) if records and not as_json else ():
        print_wide(each)
    bench.judge()
    for some in itertools.groupby(records, key=lambda one: (one["length"], one["batch"])):
        (stderr() if as_json else stdout()).print(advice(list(some[1])), soft_wrap=True)
