"""Selections beside exact attention, step by step.

usage: python3 -m benchmarks.recall recall|drift --method pariskv,quest [--budget 256] [--retrieved 100] [--length 4096] ...

recall: after one prefill for all, known tokens are sent through each method one by one. drift: the same over a long generation,
by decode position. recall_at_k: the share of the exact top-k among the k rows selected; at rows: of as many as the budget lets a
method bring; ceiling: the same for the best among the candidates, for methods that choose candidates first. attention_mass: the
share of the exact softmax that is covered. --prompt: "text", "needle" and published benchmarks with their data, as in
longbench_qasper=qasper.jsonl, whose last --steps tokens are sent. Prints a JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from benchmarks.passages import Kind, Passage, maker
from benchmarks.script import run_as_script
from kvthaw.cli.options import variants_of
from kvthaw.engine.decode import decode, generate
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt, load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling, sample
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.evaluate import plot
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.passages import text_name
from kvthaw.evaluate.probe import Probe, Quality
from kvthaw.evaluate.results import Record, ResultsFile, Setting
from kvthaw.evaluate.variant import Variant, complete, setting_of, whole
from kvthaw.methods import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Follow = Literal["text", "full", "own"]
MOST_BINS = 32


@dataclass(frozen=True, slots=True)
class Study:
    """What is watched, under every variant.

    length: tokens of the prompt. steps: tokens sent after it. kinds: of passages; samples: of each. follow: "text"
    sends the passage's own continuation, "full" what the model draws with full attention at `temperature` (0: the likeliest), the
    same to all, "own" what each variant draws by itself; stop tokens included, for text alone. probe: every n-th step is compared
    with exact attention. text: None is the book that ships.
    """

    length: int
    steps: int
    kinds: tuple[Kind, ...] = ("text", "needle")
    samples: int = 1
    seed: int = 0
    probe: int = 1
    follow: Follow = "text"
    temperature: float = 1.0
    text: str | None = None

    def __post_init__(self) -> None:
        at_least(1, length=self.length, steps=self.steps, samples=self.samples, probe=self.probe)
        at_least(0, temperature=self.temperature)
        for kind in self.kinds:
            maker(kind)
        one_of(get_args(Follow), follow=self.follow)
        if self.follow != "text" and self.kinds != ("text",):
            raise ConfigError(f"follow is {self.follow!r}, for prompts of text alone; they are {', '.join(self.kinds)}")
        if self.probe > self.steps:
            raise ConfigError(f"probe is {self.probe}; it must be at most the {self.steps} steps")

    @property
    def bins(self) -> int:
        """Into how many parts the steps are cut, at most 32; four or a multiple where so many are observed."""
        observed = -(-self.steps // self.probe)
        most = min(MOST_BINS, observed)
        return most - most % 4 if most >= 4 else most


def pooled_quality(parts: Sequence[Quality]) -> Quality:
    """Return the means of all that the parts observed; a part counts by how much it observed."""
    found: dict[str, float | None] = {}
    for name in [field.name for field in fields(Quality) if field.name != "observed"]:
        known = [(part.observed, value) for part in parts if (value := getattr(part, name)) is not None]
        count = sum(n for n, _ in known)
        found[name] = sum(n * value for n, value in known) / count if count else None
    return Quality(observed=sum(part.observed for part in parts), **found)


@dataclass(frozen=True, slots=True)
class Summary:
    """All records of one variant. means: over everything; by kind of prompt, by bin of the steps, by layer and by KV head of it."""

    study: Study
    variant: Variant
    setting: Setting
    samples: int
    held_budget: int | None
    means: Quality
    kinds: dict[str, Quality]
    bins: tuple[Quality, ...]
    layers: dict[int, Quality]
    heads: dict[int, tuple[Quality, ...]]
    seconds: float
    versions: dict[str, str]

    @staticmethod
    def of(study: Study, variant: Variant, records: Sequence[Record]) -> Summary:
        """Pool the records of a variant, of one study."""
        first, pool = records[0], pooled_quality
        bins = [[Quality(**part) for part in record["bins"]] for record in records]
        of_kind = {
            kind: [part for record, of in zip(records, bins, strict=True) if record["kind"] == kind for part in of]
            for kind in study.kinds
        }

        def pooled(name: str, layer: str) -> list[list[Quality]]:
            return [[Quality(**part) for part in parts] for parts in zip(*(r[name][layer] for r in records), strict=True)]

        return Summary(
            study,
            variant,
            first.setting,
            len(records),
            first["held_budget"],
            pool([part for of in bins for part in of]),
            {kind: pool(parts) for kind, parts in of_kind.items()},
            tuple(pool(parts) for parts in zip(*bins, strict=True)),
            {int(layer): pool([Quality(**record["layers"][layer]) for record in records]) for layer in first["layers"]},
            {int(layer): tuple(pool(parts) for parts in pooled("heads", layer)) for layer in first["heads"]},
            sum(record["seconds"] for record in records),
            first["versions"],
        )

    def quarters(self) -> tuple[Quality, ...]:
        """The steps in four parts; none where fewer were observed."""
        size = len(self.bins) // 4
        return tuple(pooled_quality(self.bins[i * size : (i + 1) * size]) for i in range(4)) if size else ()

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON, to six digits. Where a number of rows was asked for, their recall also stands under
        recall_at_<number>."""
        about = {name: value for name, value in self.setting.items() if name not in ("kind", "options")}
        last, count = self.study.steps, len(self.bins)
        edges = [(i * last // count, (i + 1) * last // count) for i in range(count)]
        return {
            **about,
            "samples": self.samples,
            "held_budget": self.held_budget,
            **self._named(self.means),
            "kinds": {kind: self._named(part) for kind, part in self.kinds.items()},
            "quarters": [self._named(part) for part in self.quarters()],
            "bins": [{"first": a, "stop": b, **self._named(part)} for (a, b), part in zip(edges, self.bins, strict=True)],
            "layers": [
                {"layer": layer, **self._named(part), "heads": [self._named(head) for head in self.heads[layer]]}
                for layer, part in self.layers.items()
            ],
            "seconds": self.seconds,
            "versions": self.versions,
        }

    def _named(self, part: Quality) -> dict[str, Any]:
        found = {name: None if value is None else round(value, 6) for name, value in part.to_dict().items()}
        count = self.setting["retrieved"]
        return found if count is None else found | {f"recall_at_{count}": found["recall_at_rows"]}


class Watcher:
    """A model, and what has been seen of it so far."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, known: ResultsFile | None = None, *, name: str = "model"
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.known = ResultsFile() if known is None else known
        self._same = identity(model, name)

    def run(
        self, study: Study, variants: Sequence[Variant], progress: Callable[[Progress], None] | None = None
    ) -> list[Summary]:
        """A summary a variant, in their order. One prefill a passage serves all; only what is not known is computed.

        Raises ConfigError, before any work, for a setting that no cache would take, and for a method that attends to everything.
        """
        for variant in variants:
            if resolve(variant.method).dense:
                raise ConfigError(f"method is {variant.method!r}; it attends to everything, so there is nothing to compare")
        wanted = [complete(self.model, variant) for variant in variants]
        check_prompt(self.model, study.length + study.steps)
        tell = progress or (lambda _: None)
        cells = [(kind, study.seed + i) for i in range(study.samples) for kind in study.kinds]
        different = list(dict.fromkeys(wanted))
        done, total = 0, len(cells) * len(different)

        def show(tokens: int, of: int, doing: str) -> None:
            tell(Progress(done, total, tokens, of, doing))

        for kind, seed in cells:
            settings = {variant: self._setting(study, variant, kind, seed) for variant in different}
            missing = {variant: setting for variant, setting in settings.items() if self.known.get(setting) is None}
            done += len(settings) - len(missing)
            if not missing:
                continue
            passage = maker(kind)(self.tokenizer, length=study.length, steps=study.steps, seed=seed, text=study.text)
            for line in self._lines(study, passage, missing, show):
                self.known.add(line)
                done += 1
        tell(Progress(total, total, 0, 0, "done"))
        summaries = []
        for variant in wanted:
            lines = [self.known.get(self._setting(study, variant, kind, seed)) for kind, seed in cells]
            summaries.append(Summary.of(study, variant, [record for record in lines if record is not None]))
        return summaries

    def _setting(self, study: Study, variant: Variant, kind: str, seed: int) -> Setting:
        return {
            **self._same,
            **setting_of(variant),
            "kind": kind,
            "text": text_name(study.text),
            "length": study.length,
            "steps": study.steps,
            "seed": seed,
            "probe": study.probe,
            "follow": study.follow,
            "temperature": None if study.follow == "text" else study.temperature,
        }

    def _lines(
        self, study: Study, passage: Passage, settings: dict[Variant, Setting], show: Callable[[int, int, str], None]
    ) -> Iterator[Record]:
        """Prefill once, then fork for each variant."""
        base = whole(self.model, settings)
        start = now(self.model.device)
        logits = prefill(self.model, base, passage.prompt, progress=lambda done, total: show(done, total, "prefill"))
        prefill_s = now(self.model.device) - start
        if study.follow == "full":
            how = Sampling(study.temperature, seed=next(iter(settings.values()))["seed"])
            passage = replace(passage, rest=self._written(base, logits, len(passage.rest), how, show))
        for variant, setting in settings.items():
            doing = str(variant)
            show(0, len(passage.rest), doing)
            start = now(self.model.device)
            cache = base.fork(variant.method, **variant.limits)
            cache.wait()
            probe = Probe(cache, every=study.probe, reference=base)
            own = Sampling(study.temperature, seed=setting["seed"]) if study.follow == "own" else None
            self._send(cache, logits, passage.rest, own, partial(_told, show, len(passage.rest), doing))
            seconds = now(self.model.device) - start - probe.seconds
            probe.detach()
            yield _line(setting, study, passage, cache, probe, prefill_s, seconds)
            del cache, probe  # its host rows go before the next one's come

    def _send(
        self, cache: Cache, logits: Tensor, rest: Sequence[int], how: Sampling | None, tell: Callable[[int], None]
    ) -> None:
        """Send tokens through a cache one by one: those of `rest`, or as many that the model draws."""
        sent = 0

        def choose(after: Tensor) -> list[int] | None:
            nonlocal sent
            sent += 1
            if sent > len(rest):
                return None
            if how is None:
                return [rest[sent - 1]]
            drawn: list[int] = sample(after, [how], torch.tensor([cache.get_seq_length()], device=after.device)).tolist()
            return drawn

        for _ in decode(self.model, cache, logits[None], choose):
            tell(sent)

    def _written(
        self, base: Cache, logits: Tensor, steps: int, how: Sampling, show: Callable[[int, int, str], None]
    ) -> list[int]:
        """Return what the model writes with full attention after the cache's tokens; the cache stays as it is."""
        written = []
        for token in generate(self.model, base.fork("full"), logits, limit=steps, sampling=how):
            written.append(token)
            show(len(written), steps, "full attention writes")
        return written


def _told(show: Callable[[int, int, str], None], of: int, doing: str, step: int) -> None:
    show(step, of, doing)


def _line(
    setting: Setting, study: Study, passage: Passage, cache: Cache, probe: Probe, prefill_s: float, seconds: float
) -> Record:
    """Return the record of one passage under one variant.

    prompt: tokens. bins: steps in order, cut into Study.bins parts. layers: by the layer's number, of those under the method;
    heads: of each, its KV heads. held_budget: the promise that the cache kept. prefill_s: shared by all variants; seconds: for
    indexing and steps, without the probe's.
    """
    seen, before, steps = probe.observations, len(passage.prompt), len(passage.rest)
    numbers = sorted({one.layer for one in seen})
    by_layer = {number: [one for one in seen if one.layer == number] for number in numbers}
    heads = {number: list(zip(*(one.heads() for one in of), strict=True)) for number, of in by_layer.items()}
    bins = [(one.length - before - 1) * study.bins // steps for one in seen]
    parts = [Quality.of([one for one, at in zip(seen, bins, strict=True) if at == i]) for i in range(study.bins)]
    measures = {
        "prompt": before,
        "steps": steps,
        "held_budget": cache.stats().budget,
        "bins": [asdict(part) for part in parts],
        "layers": {str(number): asdict(Quality.of(of)) for number, of in by_layer.items()},
        "heads": {str(number): [asdict(Quality.of(of)) for of in each] for number, each in heads.items()},
        "prefill_s": prefill_s,
        "seconds": seconds,
        "versions": versions(),
    }
    return Record(setting, measures)


def recall_lines(summaries: Sequence[Summary], path: Path) -> None:
    """Recall and share of the exact mass against the rows selected, a line a method, where a method has several budgets; else by
    layer."""
    groups: dict[tuple[str, int, int], list[Summary]] = {}
    for one in summaries:
        groups.setdefault((one.setting["method"], one.setting["length"], one.setting["dense_layers"]), []).append(one)
    several = any(len(group) > 1 for group in groups.values())
    curves: dict[str, tuple[list[float], list[Quality]]] = {}
    for (method, length, _), group in groups.items():
        if several:
            known = sorted((one for one in group if one.means.rows is not None), key=lambda one: one.means.rows or 0.0)
            curves[f"{method}, {length:,}"] = [one.means.rows or 0.0 for one in known], [one.means for one in known]
            continue
        layers = group[0].layers
        curves[f"{plot.name(group[0].variant)}, {length:,}"] = [float(layer) for layer in layers], list(layers.values())
    _panels(curves, "rows selected" if several else "layer", path, title="selections beside exact attention")


def drift_lines(summaries: Sequence[Summary], path: Path) -> None:
    """Recall and share of the exact mass by decode position, a line a variant."""
    curves = {}
    for one in summaries:
        width = one.study.steps / len(one.bins)
        curves[plot.name(one.variant)] = [(i + 0.5) * width for i in range(len(one.bins))], list(one.bins)
    study = summaries[0].study
    _panels(curves, "tokens after the prompt", path, title=f"drift after a prompt of {study.length:,} tokens")


def _panels(curves: Mapping[str, tuple[Sequence[float], Sequence[Quality]]], across: str, path: Path, *, title: str) -> None:
    figure = plot.new(15, 4.4)
    panels = figure.subplots(1, 3)
    measures = (
        ("recall_at_rows", "ceiling", "recall of the exact rows"),
        ("mass_of_exact", "ceiling_of_exact", "mass, of exact"),
        ("attention_mass", "ceiling_mass", "attention mass (full attention: 1)"),
    )
    for axis, (field, ceiling, label) in zip(panels, measures, strict=True):
        for number, (legend, (places, parts)) in enumerate(curves.items()):
            values, best = ([getattr(part, of) for part in parts] for of in (field, ceiling))
            axis.plot(places, _gaps(values), marker="o", markersize=3, color=f"C{number % 10}", label=legend)
            if any(value is not None for value in best):
                axis.set_title("dotted: the ceiling that the candidates set", fontsize=8)
                axis.plot(places, _gaps(best), linestyle=":", color=f"C{number % 10}")
        axis.set_xlabel(across)
        axis.set_ylabel(label)
    panels[2].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    plot.save(figure, path)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("recall", "drift"))
    words = {
        "model": "shipped",
        "method": "pariskv",
        "budget": None,
        "retrieved": None,
        "prompt": "text,needle",
        "dense-layers": "auto",
    }
    for name, default in (words | {"length": None, "follow": "text"}).items():
        parser.add_argument(f"--{name}", default=default)
    for name, value in {"samples": 1, "steps": 32, "probe": None, "seed": 0, "new-tokens": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--temperature", type=float, default=1.0)
    for name in ("text", "out", "plot"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args(arguments)
    plot.check(given.plot)
    drift = given.kind == "drift"
    rows = "100" if drift and given.budget is None and given.retrieved is None else given.retrieved
    budget, retrieved, dense = (None if one is None else [one] for one in (given.budget, rows, given.dense_layers))
    variants = variants_of([given.method], budget, retrieved, dense)
    text = None if given.text is None else given.text.read_text(encoding="utf-8")
    lengths = [int(part) for part in (given.length or ("8192" if drift else "4096")).split(",")]
    how: dict[str, Any] = {"samples": given.samples, "seed": given.seed, "text": text, "kinds": tuple(given.prompt.split(","))}
    if drift:
        how |= {"kinds": ("text",), "follow": given.follow, "temperature": given.temperature}
    steps, probe = (given.new_tokens, given.probe or 16) if drift else (given.steps, given.probe or 1)
    studies = [Study(length, steps, probe=probe, **how) for length in lengths]
    watcher = Watcher(*load(given.model), ResultsFile(given.out), name=given.model)
    summaries = [one for study in studies for one in watcher.run(study, variants)]
    for one in summaries:
        print(json.dumps({"eval": given.kind} | one.to_dict()), flush=True)
    if given.plot is not None:
        (drift_lines if drift else recall_lines)(summaries, given.plot)


if __name__ == "__main__":
    run_as_script(main)
