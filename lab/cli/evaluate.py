"""python -m lab eval: a task under many methods, budgets and lengths, or what selections miss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvthaw.cli import options
from kvthaw.cli.common import print_results, tell_outdated, warned
from kvthaw.cli.options import ChatOptions, ModelOptions, VariantOptions, flat, listed, tokens_of, words
from kvthaw.cli.progress import bars, shown
from kvthaw.errors import ConfigError
from lab.cli import options as own
from lab.cli import perplexity, published
from lab.cli.options import ended_as_shard, files_of, questions_of, save_plot, shard_of
from lab.evaluate.published import benchmarks
from lab.evaluate.tasks import SUITES, TASKS, find, named

if TYPE_CHECKING:
    from rich.table import Table

    from kvthaw.evaluate.results import Record

EXAMPLES = (
    "Tasks: " + ", ".join(TASKS) + "\n\nSuites of tasks: " + ", ".join(SUITES) + "\n\n"
    "Options of tasks: [bold]python -m lab eval task "
    "--help[/]. Benchmarks that need published data, such as gsm8k and longbench: "
    "[bold]python -m lab eval published --help[/]\n\nExamples:\n\n"
    "  python -m lab eval passkey --method icecache-digest --budget 64 --length 16384 --samples 20\n\n"
    "  python -m lab eval passkey --method icecache-digest,oracle,streaming --budget 64,256 --length 4096,16384 "
    "--plot passkey.png\n\n"
    "  python -m lab eval niah_multikey --method icecache-digest --dense-layers 0,2 --question sparse --json "
    "--out niah.jsonl\n\n"
    "  python -m lab eval niah --method full,prkv --length 2048,4096,8192 --samples 20 --plot heat.png\n\n"
    "  python -m lab eval ruler --model meta-llama/Llama-3.1-8B --method pariskv --length 32768 --text essays.txt "
    "--data ruler_qa_1=dev-v1.1.json --data ruler_qa_2=hotpot_dev_distractor_v1.json\n\n"
    "  python -m lab eval babilong --data tasks_1-20_v1-2/en --method full,prkv\n\n"
    "  python -m lab eval perplexity --method icecache-digest,prkv --length 1024,4096,16384 --plot ppl.png"
)

_EVEN = ["even"]


class Tasks(TyperGroup):
    """What is no command of its own is the name of a task or of a published benchmark, or an option of a task."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name before a task's or a benchmark's."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["published" if benchmarks(args[0].partition(",")[0]) else "task", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Tasks, no_args_is_help=True, rich_markup_mode="rich", epilog=EXAMPLES)


@app.callback()
def _eval() -> None:
    """Measure the accuracy of methods on tasks, published benchmarks and perplexity, and their recall against exact attention.

    python -m lab eval TASK runs a task or a published benchmark; python -m lab eval perplexity decodes a text through methods.
    kvthaw eval agreement compares them with full attention on your own text.
    """


@app.command("task", epilog=EXAMPLES)
@flat
def evaluate(
    loading: ModelOptions,
    methods: VariantOptions,
    template: ChatOptions,
    task: Annotated[str, typer.Argument(help="Tasks or suites, separated by commas; see the list below.")],
    length: own.Lengths = options.LENGTH,
    samples: Annotated[int, typer.Option(min=1, help="Samples for each task and length.")] = 20,
    depths: Annotated[
        list[str],
        typer.Option(
            help="Depths of the facts in percent, equally often; [bold]even[/]: 0 to 95 by 5, [bold]random[/]: drawn; "
            f"{options.SEVERAL}."
        ),
    ] = _EVEN,
    question: own.Questions = own.DENSE,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. Default: the task's own, 4,096 with --thinking.")
    ] = None,
    no_full: own.NoFull = False,
    shard: own.ShardOf = "1/1",
    probe: Annotated[int, typer.Option(min=0, help="Compare every n-th step with exact attention; 0 never.")] = 2,
    text: own.Text = None,
    data: own.Data = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Append each sample to this file as a line of JSON; samples already in it are not run again."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw accuracy into this PNG file: bars, or depth by length if there are several lengths."),
    ] = None,
    kv_dir: own.KvDir = None,
) -> None:
    """Run tasks under every method, budget and length, and under full attention on the same samples.

    One prefill a sample serves all of them. A prompt has --length tokens without the answer, or up to 1 % fewer if the
    tokenizer cannot hit the number. A prompt of a published file keeps its own length, which must not be greater. With
    --kv-dir the time to the first token is the time of a restore.
    """
    try:
        tasks = named(task)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="TASK") from None
    files = {name: Path(one) for name, one in files_of(data or [], tasks).items()}
    lengths, where, questions = listed(length, tokens_of, "--length"), _depths(depths), questions_of(question)
    mine, asked = shard_of(shard, out), template.asked()
    from lab.evaluate.job import Job
    from lab.evaluate.kv_dir import KvDir

    variants = methods.variants()
    from kvthaw.evaluate.results import ResultsFile
    from kvthaw.evaluate.variant import FULL, Variant
    from lab.evaluate.overview import by_task
    from lab.evaluate.plot import accuracies, check
    from lab.evaluate.prefills import part, prefilled
    from lab.evaluate.runner import Runner, summarize
    from lab.evaluate.tables import table

    check(plot)
    for name in tasks:
        find(name, files.get(name))  # nor do wrong files
    haystack = words(text)
    jobs = [
        Job(name, n, samples, seed, where, one, probe, haystack, files.get(name), asked, max_new_tokens)
        for name, n, one in itertools.product(tasks, lengths, questions)
    ]
    results = ResultsFile(out)
    llm, tokenizer = loading.load([each.cache for each in variants], asked, template=template.template())
    folder = None if kv_dir is None else KvDir(kv_dir, warned)
    runner = Runner(llm, tokenizer, results, name=loading.model, **prefilled(llm, full=not no_full, kv_dir=folder))
    summaries: list[dict[str, Any]] = []
    found: dict[tuple[str, Variant, int], list[Record]] = {}
    with bars() as progress:
        for job in jobs:
            name = job.task if len(questions) == 1 else f"{job.task}, question {job.question}"
            show = shown(progress, f"{name} {job.length:,}", job.samples)
            records = runner.run(job, variants, show, places=part(runner.places(job), mine))
            for variant, some in records.items():
                found.setdefault((name, variant, job.length), []).extend(some)
            if mine[1] == 1:
                summaries += [summarize(some, records.get(FULL, ())) for some in records.values()]
    tell_outdated(results.outdated)
    if ended_as_shard(mine, out):
        return
    save_plot(plot, lambda path: accuracies(found, path, title=f"{task}, question {', '.join(questions)}"))
    asked_for = [one for one in summaries if one["method"] != "full" or FULL in variants]

    def tables() -> list[Table]:
        if len(tasks) == 1:
            return [table([one for one in asked_for if one["question"] == way]) for way in questions]
        return [made for way in questions for made in by_task([one for one in summaries if one["question"] == way])]

    print_results(asked_for, as_json, tables)


app.command("published", epilog=published.EXAMPLES)(published.evaluate)
app.command("perplexity", epilog=perplexity.EXAMPLES)(perplexity.perplexity)


def _depths(given: list[str]) -> tuple[float, ...]:
    if given in (_EVEN, ["random"]):
        return tuple(i / 100 for i in range(0, 100, 5)) if given == _EVEN else ()
    percents = listed(given, float, "--depths")
    for percent in percents:
        if not 0 <= percent <= 100:
            raise typer.BadParameter(
                f"{percent:g} is no share in percent; it must lie between 0 and 100", param_hint="--depths"
            )
    return tuple(percent / 100 for percent in percents)
