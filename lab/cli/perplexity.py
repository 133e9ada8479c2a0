"""python -m lab eval perplexity: a text sent through every method."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_results, tell_outdated, warned
from kvthaw.cli.options import ModelOptions, VariantOptions, flat, listed, tokens_of, words
from kvthaw.cli.progress import bars, shown
from lab.cli import options as own
from lab.cli.options import ended_as_shard, save_plot, shard_of

EXAMPLES = (
    "Examples:\n\n  python -m lab eval perplexity --method icecache-digest,prkv,streaming --length 1024,4096,16384 "
    "--plot ppl.png\n\n"
    "  python -m lab eval perplexity --method clusterkv,prkv,thaw --budget 1024 --length 2048,4096,8192,16384,32000 "
    "--samples 4 "
    "--text novel.txt --model meta-llama/Llama-3.1-8B --out ppl.jsonl --json"
)

_LENGTHS = ["1024", "2048", "4096"]


@dataclass(frozen=True, slots=True)
class _VariantOptions(VariantOptions):
    method: options.Methods = field(default_factory=own.BOTH.copy)


@flat
def perplexity(
    loading: ModelOptions,
    methods: _VariantOptions,
    length: own.Lengths = _LENGTHS,
    measured: Annotated[int, typer.Option(min=1, help="Tokens scored after each length.")] = 64,
    text: own.LongText = None,
    samples: Annotated[int, typer.Option(min=1, help="Places in the text at which a prompt starts.")] = 1,
    no_full: own.NoFull = False,
    shard: own.ShardOf = "1/1",
    kv_dir: own.KvDir = None,
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity by position into this PNG file.")] = None,
) -> None:
    """Measure perplexity by position over a text, under the methods and full attention (ClusterKV's figure 10).

    A prompt of each length is prefilled. Each method then decodes the tokens that follow in the text, one by one, and every
    next token is scored. The text must be long enough; it is not repeated.
    """
    variants, mine = methods.variants(), shard_of(shard, out)
    from kvthaw.evaluate.results import ResultsFile
    from kvthaw.evaluate.variant import FULL, Variant
    from lab.evaluate.kv_dir import KvDir
    from lab.evaluate.overview import perplexities
    from lab.evaluate.perplexity import Course, Reader, summarize
    from lab.evaluate.plot import check, perplexity_lines
    from lab.evaluate.prefills import part, prefilled

    check(plot)
    sizes, read = listed(length, tokens_of, "--length"), words(text)
    courses = [Course(n, measured, samples, seed, read) for n in sorted(sizes)]
    results = ResultsFile(out)
    llm, tokenizer = loading.load([each.cache for each in variants])
    found: dict[Variant, list[dict[str, Any]]] = {}
    with bars() as progress:
        folder = None if kv_dir is None else KvDir(kv_dir, warned)
        reader = Reader(llm, tokenizer, results, name=loading.model, **prefilled(llm, full=not no_full, kv_dir=folder))
        for course in courses:
            show, places = shown(progress, str(course), samples), part(reader.places(course), mine)
            records = reader.run(course, variants, show, places=places)
            if mine[1] == 1:
                for variant, some in records.items():
                    found.setdefault(variant, []).append(summarize(some, records.get(FULL, ())))
    tell_outdated(results.outdated)
    if ended_as_shard(mine, out):
        return
    summaries = [one for each in found.values() for one in each]
    save_plot(plot, lambda path: perplexity_lines(found, path))
    print_results(summaries, as_json, lambda: [perplexities(summaries)])
