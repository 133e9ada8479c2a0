"""kvthaw eval gsm8k, math500, aime24, gpqa_diamond, longbench_*, ...: published benchmarks under many methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvthaw.cli import options
from kvthaw.cli.common import bars, draw, load_model, print_results, shown, tell_outdated
from kvthaw.cli.options import variants_of
from kvthaw.evaluate.published import BENCHMARKS, FAMILIES, benchmarks
from kvthaw.formatting import number, share

if TYPE_CHECKING:
    from kvthaw.evaluate.published.base import Ask
    from kvthaw.evaluate.published.results import Summary

EXAMPLES = (
    "Benchmarks: "
    + ", ".join(BENCHMARKS)
    + "\n\nSeveral of them: "
    + ", ".join(FAMILIES)
    + "\n\nTheir data is read from a file in the published format (.jsonl, .json, .csv, "
    "gzipped or not), from a folder of such files, or from the hub.\n\nExamples:\n\n"
    "  kvthaw eval gsm8k --data test.jsonl --model Qwen/Qwen3-8B --method icecache,oracle --budget 0.1 --limit 200\n\n"
    "  kvthaw eval aime24 --data hub --model Qwen/Qwen3-8B --method prkv,snapkv-refreshed --budget 1024 --samples 4\n\n"
    "  kvthaw eval longbench_v2_cot --data longbench_v2.jsonl --model MODEL --method pariskv --retrieved 100 --length 120000\n\n"
    "  kvthaw eval longbench_en --data LongBench/data --model MODEL --method icecache,pariskv --budget 256 --length 31500\n\n"
    "  kvthaw eval longbench_hotpotqa --data LongBench/data --model MODEL --method clusterkv --question sparse --length 31500\n\n"
    "  kvthaw eval longgenbench_16k --data Dataset_short.json --model MODEL --method icecache --judge self --out answers.jsonl"
)


def evaluate(
    benchmark: Annotated[str, typer.Argument(help="A benchmark, or a name of several; all of them stand below.")],
    data: Annotated[
        str | None,
        typer.Option(help="A file, a folder, [bold]hub[/] to download it, or the id of a copy on the hub.", metavar="PATH"),
    ] = None,
    model: options.Model = "shipped",
    method: options.Methods = "icecache",
    budget: Annotated[str, options.BUDGETS] = "256",
    retrieved: options.Instead = None,
    dense_layers: options.DenseLayers = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Ask the first so many questions only.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers drawn for each question: pass@k and avg@k.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; the benchmark's own if not given.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this sum; the benchmark's own.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer; the benchmark's own.")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Cut longer prompts in the middle to so many tokens, as LongBench does.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Ask through the chat template; where the tokenizer and the benchmark have one, if not given."),
    ] = None,
    question: options.Question = "dense",
    judge: Annotated[
        str | None,
        typer.Option(help="Who judges longgenbench: [bold]self[/], a folder or a hub id; words are compared if not given."),
    ] = None,
    capture: Annotated[
        bool, typer.Option(help="On a GPU, replay steps as captured CUDA graphs: faster where answers are long.")
    ] = False,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: Annotated[
        Path | None, typer.Option(help="Append a JSON line an answer to this file; what stands there is not asked again.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw every variant's score into this PNG file, a panel a benchmark.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Ask a published benchmark's questions under every method and budget, full attention beside them.

    One prefill a question serves all of them; the answers to one question are drawn as one batch.
    """
    wanted = benchmarks(benchmark)
    if not wanted:
        known = ", ".join((*BENCHMARKS, *FAMILIES))
        raise typer.BadParameter(f"{benchmark!r} is not a benchmark; there are: {known}", param_hint="BENCHMARK")
    variants = variants_of(method, budget if retrieved is None else None, retrieved, dense_layers)
    from kvthaw.evaluate.plot import check, score_bars
    from kvthaw.evaluate.published.results import Answers, summarize
    from kvthaw.evaluate.published.runner import Examiner, Run
    from kvthaw.evaluate.variant import FULL

    check(plot)
    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    changes = {name: value for name, value in given.items() if value is not None}
    items = [one.load(data)[:limit] for one in wanted]
    answers = Answers(out)
    llm, tokenizer = load_model(model, device, dtype)
    template = getattr(tokenizer, "chat_template", None) is not None
    runs = [
        Run(
            one,
            questions,
            replace(one.plan, **changes),
            samples,
            length,
            template and one.plan.chat if chat is None else chat,
            question,  # type: ignore[arg-type]
            seed,
            judge or "",
        )
        for one, questions in zip(wanted, items, strict=True)
    ]
    examiner = Examiner(llm, tokenizer, answers, name=model)
    ask: Ask | None = None
    if judge is not None:
        ask = examiner.ask if judge == "self" else Examiner(*load_model(judge, device, dtype), name=judge).ask
    summaries: list[Summary] = []
    with bars() as progress:
        for run in runs:
            watch = shown(progress, run.benchmark.name, len(run.items))
            found = examiner.run(run, variants, watch, ask, capture=capture)
            summaries += [summarize(found[variant], found[FULL]) for variant in dict.fromkeys((*variants, FULL))]
    tell_outdated(answers.outdated)
    draw(plot, lambda path: score_bars(summaries, path))
    tables = table if len(runs) == 1 else by_benchmark
    print_results((summary.to_dict() for summary in summaries), as_json, lambda: [tables(summaries)])


def by_benchmark(summaries: list[Summary]) -> Table:
    """Scores in percent, a row a benchmark and a column a variant, and their mean over the benchmarks."""
    first = summaries[0]
    where = f"question {first.question}, {first.model} in {first.dtype} on {first.device}"
    made = Table(title=f"avg@{first.samples}, {where}", box=SIMPLE_HEAD)
    variants = list(dict.fromkeys(map(_variant, summaries)))
    for name in ("benchmark", "questions", *variants):
        made.add_column(name, justify="left" if name == "benchmark" else "right", no_wrap=True)
    scores: dict[str, list[float]] = {variant: [] for variant in variants}
    for benchmark in dict.fromkeys(row.benchmark for row in summaries):
        rows = {_variant(row): row for row in summaries if row.benchmark == benchmark}
        for variant in variants:
            scores[variant].append(rows[variant].score)
        made.add_row(benchmark, f"{rows[variants[0]].n:,}", *(share(rows[variant].score) for variant in variants))
    made.add_section()
    made.add_row("mean", "", *(share(sum(every) / len(every)) for every in scores.values()))
    return made


def _variant(row: Summary) -> str:
    asked = "" if row.budget is None and row.retrieved is None else f"\n{row.budget or f'{row.retrieved} retrieved'}"
    return row.method + asked + (f"\n{row.dense_layers} dense" if row.dense_layers else "")


def table(summaries: list[Summary]) -> Table:
    """One row a variant; shares in percent."""
    first = summaries[0]
    drawn = (
        f", {first.samples} answer{'s' * (first.samples > 1)} each at temperature {first.temperature:g}, top-p {first.top_p:g}"
        if first.temperature
        else ""
    )
    where = f"question {first.question}, {first.model} in {first.dtype} on {first.device}"
    title = f"{first.benchmark}: {first.n} question{'s' * (first.n > 1)}{drawn}, {where}"
    made = Table(title=title, box=SIMPLE_HEAD)
    ks = [k for k in first.pass_at if k > 1]
    extra = list(dict.fromkeys(name for row in summaries for name in row.scores))
    columns = ("method", "budget", "dense\nlayers", f"avg@{first.samples}", "95 %", *(f"pass@{k}" for k in ks), *extra)
    for name in (*columns, "ended", "tokens\nprompt", "tokens\nanswer", "tokens\nattended", "hit\nrate"):
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in summaries:
        made.add_row(
            row.method,
            "-" if row.budget is None and row.retrieved is None else str(row.budget or f"{row.retrieved} retrieved"),
            str(row.dense_layers),
            share(row.score),
            "-" if row.score_95 is None else f"{100 * row.score_95[0]:.0f}-{100 * row.score_95[1]:.0f}",
            *(share(row.pass_at.get(k)) for k in ks),
            *(share(row.scores.get(name)) for name in extra),
            share(row.ended),
            f"{row.tokens:,.0f}",
            f"{row.new_tokens:,.0f}",
            "all" if row.attended_mean is None else number(row.attended_mean),
            share(row.hit_rate),
        )
    return made
