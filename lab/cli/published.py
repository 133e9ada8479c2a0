"""python -m lab eval gsm8k, math500, aime24, gpqa_diamond, longbench_*, ...: published benchmarks under many methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_results, tell_outdated, warned
from kvthaw.cli.options import ModelOptions, SystemOptions, VariantOptions, flat
from kvthaw.cli.progress import bars, shown
from lab.cli import options as own
from lab.cli.options import ended_as_shard, questions_of, save_plot, shard_of
from lab.evaluate.published import BENCHMARKS, FAMILIES, benchmarks

EXAMPLES = (
    "Benchmarks: "
    + ", ".join(BENCHMARKS)
    + "\n\nSuites of them: "
    + ", ".join(FAMILIES)
    + "\n\n--data is a file in the published format (.jsonl, .json, .csv, "
    "gzipped or not), a folder of such files, or hub.\n\nExamples:\n\n"
    "  python -m lab eval gsm8k --data test.jsonl --model Qwen/Qwen3-8B --method icecache-digest,oracle --budget 0.1 "
    "--limit 200\n\n"
    "  python -m lab eval aime24 --data hub --model Qwen/Qwen3-8B --method prkv,thaw --budget 1024 --samples 4\n\n"
    "  python -m lab eval longbench_v2_cot --data longbench_v2.jsonl --model MODEL --method pariskv --retrieved 100 "
    "--length 120000\n\n"
    "  python -m lab eval longbench_en --data LongBench/data --model MODEL --method icecache,pariskv --budget 256 "
    "--length 31500\n\n"
    "  python -m lab eval longbench_hotpotqa,longbench_musique --data LongBench/data --model MODEL --method clusterkv "
    "--question sparse "
    "--length 31500\n\n"
    "  python -m lab eval longgenbench_16k --data Dataset_short.json --model MODEL --method icecache --judge self "
    "--out answers.jsonl"
)


@flat
def evaluate(
    loading: ModelOptions,
    methods: VariantOptions,
    template: SystemOptions,
    benchmark: Annotated[str, typer.Argument(help="Benchmarks or suites, separated by commas; see the list below.")],
    data: Annotated[
        str | None,
        typer.Option(help="A file, a folder, [bold]hub[/] to download it, or the id of a copy on the hub.", metavar="PATH"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run only this number of questions, from the first on.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers sampled for each question, for pass@k and avg@k.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the benchmark's own.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens with this total probability. Default: the benchmark's own."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. Default: the benchmark's own.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            parser=options.tokens_of,
            metavar="TOKENS",
            help="Truncate longer prompts in the middle to this number of tokens, as LongBench does.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Use the chat template. Default: if tokenizer and benchmark have one."),
    ] = None,
    question: own.Questions = own.DENSE,
    no_full: own.NoFull = False,
    shard: own.ShardOf = "1/1",
    probe: Annotated[
        int, typer.Option(min=0, help="Compare every n-th step with exact attention (mass, recall, drift); 0: never.")
    ] = 0,
    kv_dir: own.KvDir = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="The model that judges longgenbench: [bold]self[/], a folder or a hub id. Default: words are compared."
        ),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Append each answer to this file as a line of JSON; answers already in it are not computed again."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the scores into this PNG file, a panel for each benchmark.")] = None,
) -> None:
    """Run published benchmarks under every method and budget, and under full attention.

    One prefill a question serves all of them; the --samples answers to a question are decoded as one batch.
    """
    asked_for = benchmark.split(",")
    for wrong in (one for one in asked_for if not benchmarks(one)):
        known = ", ".join((*BENCHMARKS, *FAMILIES))
        raise typer.BadParameter(f"{wrong!r} is not a benchmark; there are: {known}", param_hint="BENCHMARK")
    wanted = list({each.name: each for one in asked_for for each in benchmarks(one)}.values())
    variants, ways = methods.variants(), questions_of(question)
    mine, asked = shard_of(shard, out), template.asked(chat)
    from kvthaw.engine.chat_template import Chat
    from kvthaw.evaluate.results import ResultsFile
    from kvthaw.evaluate.variant import FULL
    from lab.evaluate.kv_dir import KvDir
    from lab.evaluate.plot import check, score_bars
    from lab.evaluate.prefills import part, prefilled
    from lab.evaluate.published.results import summarize
    from lab.evaluate.published.runner import Examiner, Run
    from lab.evaluate.tables import by_benchmark, scores

    check(plot)
    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    changes = {name: value for name, value in given.items() if value is not None}
    items = [one.load(data)[:limit] for one in wanted]
    results = ResultsFile(out)
    llm, tokenizer = loading.load([each.cache for each in variants], asked, template=template.template())
    has_template = getattr(tokenizer, "chat_template", None) is not None
    runs = [
        Run(
            one,
            questions,
            replace(one.generation, **changes),
            samples,
            length,
            Chat() if chat is None and asked is None and has_template and one.generation.chat else asked,
            way,
            seed,
            judge or "",
            probe,
        )
        for one, questions in zip(wanted, items, strict=True)
        for way in ways
    ]
    folder = None if kv_dir is None else KvDir(kv_dir, warned)
    examiner = Examiner(llm, tokenizer, results, name=loading.model, **prefilled(llm, full=not no_full, kv_dir=folder))
    if judge is not None:
        examiner.judge = examiner.ask if judge == "self" else Examiner(*replace(loading, model=judge).load(), name=judge).ask
    summaries: list[dict[str, Any]] = []
    with bars() as progress:
        for run in runs:
            name = run.benchmark.name if len(ways) == 1 else f"{run.benchmark.name}, question {run.question}"
            watch = shown(progress, name, len(run.items))
            found = examiner.run(run, variants, watch, places=part(examiner.places(run), mine))
            if mine[1] == 1:
                summaries += [summarize(some, found.get(FULL, ())) for some in found.values()]
    tell_outdated(results.outdated)
    if ended_as_shard(mine, out):
        return
    save_plot(plot, lambda path: score_bars(summaries, path))
    tables = scores if len(wanted) == 1 else by_benchmark
    of = [[one for one in summaries if one["question"] == way] for way in ways]
    print_results(summaries, as_json, lambda: list(map(tables, of)))
