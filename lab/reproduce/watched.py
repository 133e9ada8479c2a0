"""Plans that compare selections with exact attention step by step: recall and attention mass by budget, layer, length, position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kvthaw.engine.chat_template import split_prompt
from kvthaw.engine.decode import feed, generate
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from kvthaw.evaluate.evaluator import Progress
from kvthaw.evaluate.files import opening, tokens_of
from kvthaw.evaluate.results import Record, Setting
from kvthaw.evaluate.variant import Variant, complete, fork, setting_of, whole
from lab.evaluate.probe import Probe, Quality
from lab.evaluate.published import BENCHMARKS
from lab.evaluate.published.base import truncate
from lab.evaluate.tasks import TASKS
from lab.reproduce.experiment import Cell, Cells
from lab.reproduce.lab import Lab
from lab.reproduce.plans import QUICK, family, said

BINS = 16
"""Parts of the steps, each with its own mean."""
DEPTH = 32
"""Layers of the papers' models: a layer is the one at the same share of another model's depth."""


class View(NamedTuple):
    """What a column shows.

    prompt: "text", the name of a task or of a benchmark.
    length: of the prompt, cut to it; 0: as it is.
    field: of Quality.
    options: added to the row's.
    layer: one alone, of DEPTH.
    part: of the steps.
    every: n-th step.
    """

    prompt: str
    length: int
    steps: int
    field: str = "recall_at_rows"
    options: str = ""
    layer: int | None = None
    part: tuple[float, float] = (0, 1)
    every: int = 1


@dataclass(frozen=True)
class Watched:
    """The tokens that full attention writes after a prompt, of a text its own, are sent through every variant one by one."""

    columns: Mapping[str, View]
    samples: int = 1
    scale: float = 100

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks whose questions are the prompts."""
        return list(dict.fromkeys(view.prompt for view in self.columns.values() if view.prompt in BENCHMARKS))

    @property
    def needs(self) -> str:
        """A model, and what the prompts come from."""
        names = dict.fromkeys(view.prompt for view in self.columns.values())
        files = dict.fromkeys(map(family, self.benchmarks))
        data = f", --data ({', '.join(files)}: a folder, or hub)" if files else ""
        return "--model" + data + ", --text (a book of PG19)" * ("text" in names)

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        asked = {(row, c): lab.variant(f"{row}:{v.options}".rstrip(":")) for row in rows for c, v in self.columns.items()}
        sources: dict[View, list[str]] = {}
        for column, view in self.columns.items():
            sources.setdefault(_source(lab, view), []).append(column)
        cells: Cells = {}
        for source, columns in sources.items():
            variants = list(dict.fromkeys(asked[row, column] for row in rows for column in columns))
            found: dict[Variant, list[Record]] = {}
            with lab.attempt(columns):
                found = watch(lab, source, variants, 1 if lab.quick else lab.limit or self.samples)
            for row in rows if found else ():
                for column in columns:
                    view, variant = self.columns[column], asked[row, column]
                    value = getattr(
                        Quality.pooled([part for record in found[variant] for part in _parts(record, view)]), view.field
                    )
                    if value is not None:
                        mine = found[variant]
                        about = f"{_named(lab, source)}, {mine[0]['prompt']:,} + {source.steps} tokens, n={len(mine)}"
                        cells[row, column] = Cell(self.scale * value, f"{lab.on}, {said(lab, variant)}, {about}")
        return cells


def _source(lab: Lab, view: View) -> View:
    """Return the view with what says how it is shown as it is by default: columns that have this in common are watched at once."""
    base = View(view.prompt, view.length, view.steps, every=view.every)
    return View("text", QUICK // 2, 4) if lab.quick else base


def _named(lab: Lab, source: View) -> str:
    return "the book that ships" if source.prompt == "text" and lab.text is None else source.prompt


def _parts(record: Record, view: View) -> list[Quality]:
    """Return what of a record a view shows."""
    if view.layer is not None:
        known = sorted(record["layers"], key=lambda number: abs(int(number) - view.layer * record["depth"] / DEPTH))
        return [Quality(**record["layers"][known[0]])]
    low, high = (
        min(int(end * len(record["bins"])), len(record["bins"]) - more) for more, end in zip((1, 0), view.part, strict=True)
    )
    return [Quality(**part) for part in record["bins"][low : max(high, low + 1)]]


def watch(lab: Lab, source: View, variants: Sequence[Variant], samples: int) -> dict[Variant, list[Record]]:
    """Return a record a prompt of every variant; what the results hold is not watched again."""
    model = lab.loaded[0]
    wanted = {variant: complete(model, variant) for variant in variants}
    found: dict[Variant, list[Record]] = {variant: [] for variant in variants}
    for number, (prompt, rest) in enumerate(prompts(lab, source, samples)):
        check_prompt(model, len(prompt) + source.steps)
        digest = hashlib.blake2b(repr((prompt, rest)).encode(), digest_size=8).hexdigest()
        same = {**lab.same, "watched": source.prompt, "digest": digest, "steps": source.steps, "probe": source.every}
        settings = {variant: {**same, **setting_of(variant)} for variant in dict.fromkeys(wanted.values())}
        missing = {variant: setting for variant, setting in settings.items() if lab.results.get(setting) is None}
        if missing:
            base = whole(model, missing)
            logits = prefill(model, base, prompt)
            rest = rest or written(lab, base, logits, source.steps, number)
            for variant, setting in missing.items():
                lab.tell(Progress(number, samples, 0, 0, str(said(lab, variant))))
                lab.results.add(_record(lab, base, variant, setting, logits, rest))
        for variant, whole_variant in wanted.items():
            record = lab.results.get(settings[whole_variant])
            assert record is not None
            found[variant].append(record)
    return found


def _record(lab: Lab, base: Cache, variant: Variant, setting: Setting, logits: Tensor, rest: list[int]) -> Record:
    model, prompt = lab.loaded[0], base.get_seq_length()
    cache = fork(base, variant)
    probe = Probe(cache, every=setting["probe"], reference=base)
    for _ in feed(model, cache, rest):
        pass
    probe.detach()
    bins: dict[int, list[Any]] = {}
    layers: dict[int, list[Any]] = {}
    for one in probe.observations:
        bins.setdefault((one.length - prompt - 1) * BINS // len(rest), []).append(one)
        layers.setdefault(one.layer, []).append(one)
    measures = {
        "prompt": prompt,
        "depth": len(cache.layers),
        "bins": [asdict(Quality.of(bins[at])) for at in sorted(bins)],
        "layers": {str(number): asdict(Quality.of(of)) for number, of in layers.items()},
    }
    cache.layers.clear()  # its rows go before the next one's come
    return Record(setting, measures)


def written(lab: Lab, base: Cache, logits: Tensor, steps: int, seed: int = 0) -> list[int]:
    """Return what the model writes with full attention after a cache's tokens; the cache stays as it is."""
    how = Sampling(0.6, top_p=0.95, seed=seed)
    return list(generate(lab.loaded[0], base.fork("full"), logits, limit=steps, sampling=how))


def prompts(lab: Lab, source: View, samples: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each prompt, and the tokens that follow if the text has them."""
    tokenizer = lab.loaded[1]
    if source.prompt == "text":
        first, body = opening(tokenizer), tokens_of(tokenizer, lab.text)
        for number in range(samples):
            start = number * (len(body) - source.length - source.steps) // max(1, samples)
            taken = [*first, *(body * 2)[start : start + source.length + source.steps - len(first)]]
            yield taken[: source.length], taken[source.length :]
    elif source.prompt in TASKS:
        for seed in range(samples):
            sample = TASKS[source.prompt].sample(tokenizer, length=source.length, seed=seed, text=lab.text)
            yield list(tokenizer(sample.prompt)["input_ids"]), []
    else:
        benchmark = BENCHMARKS[source.prompt]
        for item in lab.items(benchmark)[:samples]:
            cut = truncate(tokenizer, item, source.length or None)
            context, question = split_prompt(tokenizer, cut.context, cut.question, lab.chat(benchmark))
            yield context + question, []
