"""kvthaw eval recall, kvthaw eval drift: selections beside exact attention."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    SeedOption,
    bars,
    budget_of,
    listed,
    load_model,
    print_wide,
    prompt_text,
    shown,
    stderr,
)

if TYPE_CHECKING:
    from kvthaw.evaluate.recall import Study, Summary
    from kvthaw.evaluate.runner import Variant

RECALL_EXAMPLES = (
    "Examples:\n\n  kvthaw eval recall --method pariskv --length 32768 --retrieved 100 --json\n\n"
    "  kvthaw eval recall --method pariskv,clusterkv,prkv,quest --budget 256,512,1024 --plot recall.png\n\n"
    "  kvthaw eval recall --method pariskv:beta=0.1,pariskv:preset=paper:rho=0.2:beta=0.1,pariskv:votes=binary --retrieved 100\n\n"
    "  kvthaw eval recall --method pariskv:preset=paper,pariskv:preset=paper:rotate=False,pariskv:centroids=learned\n\n"
    "  kvthaw eval recall --method clusterkv:distance=l2:clusters=400,prkv:share=0.5:interval=64 --prompt text --text novel.txt"
)
DRIFT_EXAMPLES = (
    "Examples:\n\n  kvthaw eval drift --method pariskv,pariskv:centroids=learned --new-tokens 4096 --plot drift.png\n\n"
    "  kvthaw eval drift --method pariskv,prkv --budget 512 --length 16384 --new-tokens 8192 --out drift.jsonl --json\n\n"
    "  kvthaw eval drift --method prkv:share=0.0,prkv,prkv:share=1.0,oracle --follow full --retrieved 1024 --plot shares.png\n\n"
    "  kvthaw eval drift --method pariskv --follow own --temperature 0.8 --model meta-llama/Llama-3.1-8B"
)

MethodOption = Annotated[
    str,
    typer.Option(
        "--method", help="Methods, separated by commas, with options as in pariskv:rho=0.2:beta=0.1; a list is a sweep."
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", help="Most tokens attended per KV head and step, or fractions of the prompt, separated by commas."
    ),
]
RetrievedOption = Annotated[
    str | None,
    typer.Option(
        "--retrieved",
        help="Instead of --budget, or beside it: tokens retrieved beside the paper's own sink and window, separated by commas.",
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text",
        help="Read this text instead of the book that ships; it begins anew where it ends.",
        exists=True,
        dir_okay=False,
    ),
]
DenseOption = Annotated[
    str,
    typer.Option(
        "--dense-layers", help="First layers that keep all KV, separated by commas; auto: 2 from 16 layers on, else 0."
    ),
]
LinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a run and nothing else on stdout.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Append a JSON line a prompt and run to this file; what stands there is not run again."),
]


def recall(
    model: ModelOption = "shipped",
    method: MethodOption = "pariskv",
    budget: BudgetOption = None,
    retrieved: RetrievedOption = None,
    length: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "4096",
    prompt: Annotated[
        str,
        typer.Option(
            help="[bold]text[/]: a text and what follows in it; [bold]needle[/]: needles in that text, then the question for one "
            "and its answer; separated by commas."
        ),
    ] = "text,needle",
    text: TextOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each kind and length.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Tokens sent after the prompt, one by one.")] = 32,
    probe: Annotated[int, typer.Option(min=1, help="Compare every n-th step with exact attention.")] = 1,
    dense_layers: DenseOption = "auto",
    seed: SeedOption = 0,
    as_json: LinesOption = False,
    out: OutOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw recall and mass into this PNG file: against rows where there are several budgets, else by layer."
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Compare what methods select with exact attention, on real text.

    After one prefill for all, known tokens are sent through each method one by one. recall at k: the share of the exact top-k among
    the k rows selected; at rows: of as many as the budget lets a method bring (with --retrieved 100 also recall_at_100); ceiling:
    the same for the best among the candidates, for methods that choose candidates first. mass: the share of the exact softmax that
    is covered, sink and window included; of exact: as a share of what the exact rows would cover; rows' mass: without sink and
    window. Without --budget and --retrieved: --budget 256.
    """
    from kvthaw.evaluate.plot import check, recall_lines
    from kvthaw.evaluate.recall import Study
    from kvthaw.evaluate.report import recall_tables

    check(plot)
    given, kinds = words(text), tuple(listed(prompt, str, "--prompt"))
    lengths = listed(length, int, "--length")
    studies = [Study(n, steps, kinds, samples, seed, probe, text=given) for n in lengths]  # type: ignore[arg-type]
    variants = variants_of(method, budget, retrieved, dense_layers, "256", None)
    summaries = _watch(studies, variants, model, device, dtype, out)
    if plot is not None:
        recall_lines(summaries, plot)
        stderr().print(f"wrote {plot}", style="dim")
    _tell("recall", summaries, as_json)
    if not as_json:
        for table in recall_tables(summaries):
            print_wide(table)


def drift(
    model: ModelOption = "shipped",
    method: MethodOption = "pariskv,pariskv:centroids=learned",
    budget: BudgetOption = None,
    retrieved: RetrievedOption = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 8192,
    new_tokens: Annotated[int, typer.Option(min=4, help="Tokens after it.")] = 4096,
    follow: Annotated[
        str,
        typer.Option(
            help="[bold]text[/]: the text goes on, the same tokens for every method; [bold]full[/]: what full attention writes, "
            "the same for every method; [bold]own[/]: each method's model writes its own. Stop tokens are ignored; a small model "
            "may soon repeat itself."
        ),
    ] = "text",
    temperature: Annotated[float, typer.Option(min=0.0, help="For --follow full and own; 0 takes the likeliest token.")] = 1.0,
    text: TextOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts, from different places.")] = 1,
    probe: Annotated[int, typer.Option(min=1, help="Compare every n-th step with exact attention.")] = 16,
    dense_layers: DenseOption = "auto",
    seed: SeedOption = 0,
    as_json: LinesOption = False,
    out: OutOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw recall and mass by decode position into this PNG file.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Compare what methods select with exact attention as a generation grows long.

    By default the text that follows the prompt is sent token by token (teacher-forced), so that every method sees the same
    tokens. The table has recall of the exact rows and attention mass in quarters of the new tokens; JSON and plot have up to 32
    parts. Without --budget and --retrieved: --retrieved 100.
    """
    from kvthaw.evaluate.plot import check, drift_lines
    from kvthaw.evaluate.recall import Study
    from kvthaw.evaluate.report import drift_table

    check(plot)
    given = {"seed": seed, "probe": probe, "follow": follow, "temperature": temperature, "text": words(text)}
    study = Study(length, new_tokens, ("text",), samples, **given)  # type: ignore[arg-type]
    if -(-new_tokens // probe) < 4:
        raise typer.BadParameter(f"every {probe}th of {new_tokens} steps leaves fewer than 4 to compare", param_hint="--probe")
    variants = variants_of(method, budget, retrieved, dense_layers, None, "100")
    summaries = _watch([study], variants, model, device, dtype, out)
    if plot is not None:
        drift_lines(summaries, plot)
        stderr().print(f"wrote {plot}", style="dim")
    _tell("drift", summaries, as_json)
    if not as_json:
        print_wide(drift_table(summaries))


def words(text: Path | None) -> str | None:
    """The text of --text, if it is given."""
    return None if text is None else prompt_text(None, text)


def variants_of(
    method: str, budget: str | None, retrieved: str | None, dense: str, usual_budget: str | None, usual_rows: str | None
) -> list[Variant]:
    """Every method under every budget and number of rows; where none is given, the usual ones."""
    if budget is None and retrieved is None:
        budget, retrieved = usual_budget, usual_rows
    names = listed(method, str, "--method")
    asked: list[tuple[int | float | None, int | None]] = []
    if budget is not None:
        asked += [(each, None) for each in listed(budget, budget_of, "--budget")]
    if retrieved is not None:
        asked += [(None, each) for each in listed(retrieved, int, "--retrieved")]
    layers = [None] if dense == "auto" else listed(dense, int, "--dense-layers")
    from kvthaw.evaluate.describe import describe
    from kvthaw.evaluate.runner import Variant
    from kvthaw.methods import resolve

    for name in names:
        describe(resolve(name))  # a wrong name or option costs no loading
    return [Variant(name, *limit, kept) for name, limit, kept in itertools.product(names, asked, layers)]


def _watch(
    studies: list[Study], variants: list[Variant], model: str, device: str | None, dtype: str, out: Path | None
) -> list[Summary]:
    from kvthaw.evaluate.recall import Line, Watcher
    from kvthaw.evaluate.results import Kept

    known = Kept(out, Line.from_json)
    llm, tokenizer = load_model(model, device, dtype)
    watcher = Watcher(llm, tokenizer, known, name=model)
    summaries = []
    with bars() as progress:
        for study in studies:
            summaries += watcher.run(study, variants, shown(progress, f"{study.length:,} tokens", len(variants)))
    return summaries


def _tell(what: str, summaries: list[Summary], as_json: bool) -> None:
    for summary in summaries if as_json else ():
        print(json.dumps({"eval": what} | summary.to_dict()))
