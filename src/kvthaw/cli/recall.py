"""kvthaw eval recall, kvthaw eval drift: selections beside exact attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli import options
from kvthaw.cli.common import bars, draw, load_model, print_results, shown, tell_outdated
from kvthaw.cli.options import listed, variants_of, words

if TYPE_CHECKING:
    from kvthaw.evaluate.recall import Study, Summary
    from kvthaw.evaluate.variant import Variant

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


def recall(
    model: options.Model = "shipped",
    method: options.Sweep = "pariskv",
    budget: Annotated[str | None, options.BUDGETS] = None,
    retrieved: options.Beside = None,
    length: Annotated[str, options.LENGTHS] = "4096",
    prompt: Annotated[
        str,
        typer.Option(
            help="[bold]text[/]: a text and what follows in it; [bold]needle[/]: needles in that text, then the question for one "
            "and its answer; separated by commas."
        ),
    ] = "text,needle",
    text: options.Text = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each kind and length.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Tokens sent after the prompt, one by one.")] = 32,
    probe: Annotated[int, typer.Option(min=1, help="Compare every n-th step with exact attention.")] = 1,
    dense_layers: options.DenseLayers = "auto",
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw recall and mass into this PNG file: against rows where there are several budgets, else by layer."
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Compare what methods select with exact attention, on real text.

    After one prefill for all, known tokens are sent through each method one by one. recall at k: the share of the exact top-k among
    the k rows selected; at rows: of as many as the budget lets a method bring (with --retrieved 100 also recall_at_100); ceiling:
    the same for the best among the candidates, for methods that choose candidates first. mass: the share of the exact softmax that
    is covered, sink and window included; of exact: as a share of what the exact rows would cover; rows' mass: without sink and
    window. Without --budget and --retrieved: --budget 256.
    """
    variants = variants_of(method, budget, retrieved, dense_layers)
    from kvthaw.evaluate.plot import check, recall_lines
    from kvthaw.evaluate.recall import Study
    from kvthaw.evaluate.report import recall_tables

    check(plot)
    given, kinds = words(text), tuple(listed(prompt, str, "--prompt"))
    lengths = listed(length, int, "--length")
    studies = [Study(n, steps, kinds, samples, seed, probe, text=given) for n in lengths]  # type: ignore[arg-type]
    summaries = _watch(studies, variants, model, device, dtype, out)
    draw(plot, lambda path: recall_lines(summaries, path))
    print_results(({"eval": "recall"} | one.to_dict() for one in summaries), as_json, lambda: recall_tables(summaries))


def drift(
    model: options.Model = "shipped",
    method: options.Sweep = "pariskv,pariskv:centroids=learned",
    budget: Annotated[str | None, options.BUDGETS] = None,
    retrieved: options.Beside = None,
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
    text: options.Text = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts, from different places.")] = 1,
    probe: Annotated[int, typer.Option(min=1, help="Compare every n-th step with exact attention.")] = 16,
    dense_layers: options.DenseLayers = "auto",
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw recall and mass by decode position into this PNG file.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Compare what methods select with exact attention as a generation grows long.

    By default the text that follows the prompt is sent token by token (teacher-forced), so that every method sees the same
    tokens. The table has recall of the exact rows and attention mass in quarters of the new tokens; JSON and plot have up to 32
    parts. Without --budget and --retrieved: --retrieved 100.
    """
    rows = "100" if budget is None and retrieved is None else retrieved
    variants = variants_of(method, budget, rows, dense_layers)
    from kvthaw.evaluate.plot import check, drift_lines
    from kvthaw.evaluate.recall import Study
    from kvthaw.evaluate.report import drift_table

    check(plot)
    given = {"seed": seed, "probe": probe, "follow": follow, "temperature": temperature, "text": words(text)}
    study = Study(length, new_tokens, ("text",), samples, **given)  # type: ignore[arg-type]
    if -(-new_tokens // probe) < 4:
        raise typer.BadParameter(f"every {probe}th of {new_tokens} steps leaves fewer than 4 to compare", param_hint="--probe")
    summaries = _watch([study], variants, model, device, dtype, out)
    draw(plot, lambda path: drift_lines(summaries, path))
    print_results(({"eval": "drift"} | one.to_dict() for one in summaries), as_json, lambda: [drift_table(summaries)])


def _watch(
    studies: list[Study], variants: list[Variant], model: str, device: str | None, dtype: str, out: Path | None
) -> list[Summary]:
    from kvthaw.evaluate.recall import Watcher
    from kvthaw.evaluate.results import ResultsFile

    known = ResultsFile(out)
    llm, tokenizer = load_model(model, device, dtype)
    watcher = Watcher(llm, tokenizer, known, name=model)
    summaries = []
    with bars() as progress:
        for study in studies:
            summaries += watcher.run(study, variants, shown(progress, f"{study.length:,} tokens", len(variants)))
    tell_outdated(known.outdated)
    return summaries
