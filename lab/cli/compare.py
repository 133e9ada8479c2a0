"""python -m lab compare: every method on the same work, and one report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_wide, tell_outdated, warned, write_whole
from kvthaw.cli.options import ChatOptions, ModelOptions, budget_of, flat, listed, many_dense, names_of, tokens_of, words
from kvthaw.cli.progress import bars, say, waiting, watched
from kvthaw.method_names import unknown_method
from lab.cli import options as own
from lab.cli.options import files_of, questions_of, shard_of

_ALL, _BUDGETS, _TASKS = (
    ["all"],
    ["64", "128", "256", "1024"],
    ["passkey", "niah", "longeval", "kv_retrieval", "agreement"],
)
EXAMPLES = (
    "Examples:\n\n"
    "  python -m lab compare --task passkey,niah,longeval,kv-retrieval --method all --budget 64,128,256,1024 --out compared\n\n"
    "  python -m lab compare --task longbench_qasper,ruler_qa_1 --data LongBench/data --data ruler_qa_1=dev-v1.1.json "
    "--length 8k\n\n"
    "  python -m lab compare --task ruler --method icecache-digest,prkv,pariskv:beta=0.2 --dense-layers 0,2 "
    "--question dense,sparse\n\n"
    "  for i in 1 2 3 4; do python -m lab compare --task passkey --length 64k --shard $i/4 --out compared & done; wait\n\n"
    "  python -m lab compare --report-only --out compared"
)


@flat
def compare(
    loading: ModelOptions,
    template: ChatOptions,
    tasks: Annotated[str | None, typer.Argument(metavar="[TASK]", help="The tasks, as for --task.")] = None,
    task: Annotated[
        list[str],
        typer.Option(
            help="Tasks, published benchmarks or suites of them, as python -m lab eval knows them; agreement: how near next-token "
            "distributions are to full attention's, on a fifth of these prompts; perplexity: of a fifth of the samples; "
            f"{options.SEVERAL}."
        ),
    ] = _TASKS,
    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="[bold]all[/], or methods, separated by commas or one by one, with options as in icecache-digest:reuse=2 and "
            "prkv:budget=256,sink=4.",
        ),
    ] = _ALL,
    plugin: options.Plugin = None,
    budget: Annotated[list[str] | None, options.budgets(",".join(_BUDGETS))] = None,
    retrieved: options.ManyRetrieved = None,
    length: own.Lengths = options.LENGTH,
    samples: Annotated[
        int, typer.Option(min=1, help="Samples a cell, the same under every method; of a benchmark its first questions.")
    ] = 50,
    question: own.Questions = own.DENSE,
    dense_layers: options.ManyDenseLayers = None,
    text: own.Text = None,
    data: own.Data = None,
    no_full: own.NoFull = False,
    probe: Annotated[
        int, typer.Option(min=0, help="Compare every n-th step with exact attention, for recall and mass; 0 never. Slow.")
    ] = 0,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples that share their decoding steps; 64, or fewer of long prompts, if not given."),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Compute every n-th piece of the work, from the i-th on, and write no report; n processes share a folder.",
        ),
    ] = "1/1",
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report what the folder holds, and compute nothing.")
    ] = False,
    seed: options.Seed = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder for results.jsonl and the report, made if need be. What is there already is not run again."),
    ] = Path("compared"),
    as_json: options.Lines = False,
    kv_dir: own.KvDir = None,
) -> None:
    """Run every task under every method, budget and length, and report them side by side.

    The report, report.html and report.md in the folder, has tables, differences over the same samples and plots;
    results.jsonl has every sample. A stopped run continues.
    """
    questions, sizes = questions_of(question), tuple(listed(length, tokens_of, "--length"))
    limits, haystack = budget or ([] if retrieved else _BUDGETS), words(text)
    part, asked = shard_of(shard, needs_out=False), template.asked()
    from kvthaw.evaluate.results import ResultsFile

    if not report_only:
        from kvthaw.engine.chat_template import Chat
        from kvthaw.evaluate.agreement import Agreement
        from kvthaw.evaluate.files import text_name
        from kvthaw.methods import METHODS
        from lab.evaluate.compare import Grid, agreement, check_texts, fifth, run
        from lab.evaluate.kv_dir import KvDir
        from lab.evaluate.perplexity import Course, Reader
        from lab.evaluate.prefills import prefilled
        from lab.evaluate.published import benchmarks
        from lab.evaluate.published.runner import Examiner, Run
        from lab.evaluate.runner import Runner
        from lab.evaluate.tasks import find, named
        from lab.evaluate.tasks.base import fingerprint_of

        names = tuple(dict.fromkeys(one for name in names_of(method) for one in (METHODS if name == "all" else [name])))
        for name in names:
            if name.partition(":")[0] not in METHODS:
                raise unknown_method(name, ("all", *METHODS))
        wanted = listed([tasks] if tasks else task, str, "--task")
        published = {each.name: each for one in wanted for each in benchmarks(one)}
        others = ",".join(name for name in wanted if name not in ("perplexity", "agreement") and not benchmarks(name))
        made = named(others) if others else []
        if "agreement" in wanted and not (made or published):
            raise typer.BadParameter("agreement is measured on the prompts of other tasks; name one", param_hint="--task")
        files = files_of(data or [], [*made, *published])
        grid = Grid(
            tasks=tuple(made),
            methods=names,
            budgets=tuple(listed(limits, budget_of, "--budget")) if limits else (),
            lengths=sizes,
            samples=samples,
            questions=tuple(questions),
            dense_layers=tuple(many_dense(dense_layers)),
            seed=seed,
            probe=probe,
            retrieved=tuple(listed(retrieved, int, "--retrieved")) if retrieved else (),
            chat=asked,
            text=haystack,
            data={name: Path(files[name]) for name in made if name in files},
        )
        jobs, variants = grid.jobs(), grid.variants()  # what is wrong costs no loading
        for name in made:
            find(name, grid.data.get(name))
        items = [(one, one.load(files.get(one.name))[:samples]) for one in published.values()]
        out.mkdir(parents=True, exist_ok=True)
        results = ResultsFile(out / "results.jsonl")
        over = {name: fingerprint_of(haystack, grid.data.get(name)) for name in made}
        check_texts(results, over | ({"perplexity": text_name(haystack)} if "perplexity" in wanted else {}))
        llm, tokenizer = loading.load([each.cache for each in variants], asked, template=template.template())
        own_template = template.chat is None and asked is None and getattr(tokenizer, "chat_template", None) is not None
        folder = None if kv_dir is None else KvDir(kv_dir, warned)
        how: dict[str, Any] = {"name": loading.model, "batch": batch}
        how |= prefilled(llm, full=not no_full, kv_dir=folder, batch=batch)
        runner, reader = Runner(llm, tokenizer, results, **how), Reader(llm, tokenizer, results, **how)
        examiner = Examiner(llm, tokenizer, results, **how)
        runs = [
            Run(
                one,
                some,
                one.generation,
                1,
                max(sizes),
                Chat() if own_template and one.generation.chat else asked,
                way,
                seed,
                probe=probe,
            )
            for one, some in items
            for way in questions
        ]
        work: list[Any] = [(runner, job) for job in jobs] + [(examiner, one) for one in runs]
        if "perplexity" in wanted:
            work += [(reader, Course(n, samples=fifth(samples), seed=seed, text=haystack)) for n in sorted(sizes)]
        if "agreement" in wanted and (compared := agreement(runner, examiner, jobs, runs)) is not None:
            work.append((Agreement(llm, tokenizer, results, **how), compared))
        with bars() as progress:
            run(work, variants, shard=part, tell=watched(progress, "beginning"))
        tell_outdated(results.outdated)
    if part[1] == 1:
        _report(out, as_json)


def _report(out: Path, as_json: bool) -> None:
    """Write the report into the folder of the results, and print its summaries."""
    from kvthaw.errors import ConfigError
    from kvthaw.evaluate.report import agreements
    from kvthaw.evaluate.results import ResultsFile
    from lab.evaluate.compare import summaries
    from lab.evaluate.overview import by_task, nearness, overview, perplexities
    from lab.evaluate.tables import by_benchmark

    with waiting("writing the report"):
        records = list(ResultsFile(out / "results.jsonl")) if out.is_dir() else []
        if not records:
            raise ConfigError(f"{str(out)!r} holds no results of python -m lab compare")
        found = summaries(records)
        document = overview(found)
        for name, text in (("report.html", document.html()), ("report.md", document.markdown())):
            write_whole(out / name, text)
    if as_json:
        for one in (*found.tasks, *found.benchmarks, *found.perplexities, *found.agreements):
            print(json.dumps(one))
        return
    near = nearness(found.agreements)
    for question in dict.fromkeys(one["question"] for one in found.tasks):
        for table in by_task([one for one in found.tasks if one["question"] == question], near):
            print_wide(table)
    for question in dict.fromkeys(one["question"] for one in found.benchmarks):
        print_wide(by_benchmark([one for one in found.benchmarks if one["question"] == question]))
    if found.agreements:
        print_wide(agreements(found.agreements))
    if found.perplexities:
        print_wide(perplexities(found.perplexities))
    say(f"wrote {out / 'report.html'} and .md")
