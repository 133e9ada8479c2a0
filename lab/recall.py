"""Selections beside exact attention, step by step.

usage: python3 -m lab.recall recall|drift --method pariskv,quest [--budget 256] [--retrieved 100] [--length 4096] ...

recall: after one prefill for all, known tokens are sent through each method one by one. drift: the same over a long generation,
by decode position. recall_at_k: the share of the exact top-k among the k rows selected; at rows: of as many as the budget lets a
method bring; ceiling: the same for the best among the candidates, for methods that choose candidates first. attention_mass: the
share of the exact softmax that is covered. Prints a JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvthaw.cli.options import VariantOptions
from kvthaw.engine.decode import feed, generate
from kvthaw.engine.hf.model import check_prompt, load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.evaluate.files import text_name
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.results import Record, ResultsFile, Setting, shared
from kvthaw.evaluate.variant import Variant, complete, fork, setting_of, whole
from lab.ablations import registered
from lab.evaluate import plot
from lab.evaluate.probe import Probe, Quality
from lab.passages import PASSAGES, Passage
from lab.script import run_as_script

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Follow = Literal["text", "full"]
Summary = dict[str, Any]
MOST_BINS = 32


@dataclass(frozen=True, slots=True)
class Study:
    """What is watched, under every variant.

    length: tokens of the prompt. steps: tokens sent after it. kinds: of PASSAGES; samples: of each. follow: "text" sends the
    passage's own continuation, "full" what the model draws with full attention at `temperature` (0: the likeliest), for text alone;
    the same to all. probe: every n-th step is compared with exact attention. text: None is the book that ships.
    """

    length: int
    steps: int
    kinds: tuple[str, ...] = ("text", "needle")
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
            one_of(PASSAGES, prompt=kind)
        one_of(get_args(Follow), follow=self.follow)
        if self.follow != "text" and self.kinds != ("text",):
            raise ConfigError(f"follow is {self.follow!r}, for prompts of text alone; they are {', '.join(self.kinds)}")
        if self.probe > self.steps:
            raise ConfigError(f"probe is {self.probe}; it must be at most the {self.steps} steps")

    @property
    def bins(self) -> int:
        """Into how many parts the steps are cut, at most 32; four or a multiple where so many are observed."""
        most = min(MOST_BINS, -(-self.steps // self.probe))
        return most - most % 4 if most >= 4 else most

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(kind, seed) of every passage."""
        return [(kind, self.seed + i) for i in range(self.samples) for kind in self.kinds]


def run(
    model: PreTrainedModel, tokenizer: Any, known: ResultsFile, study: Study, variants: Sequence[Variant], name: str = "model"
) -> list[Summary]:
    """Return a summary a variant, in their order. One prefill a passage serves all; only what is not known is computed.

    Raises ConfigError, before any work, for a setting that no cache would take, and for a method that attends to everything.
    """
    for variant in variants:
        if variant.resolved.dense:
            raise ConfigError(f"method is {variant.method!r}; it attends to everything, so there is nothing to compare")
    same, wanted = identity(model, name), [complete(model, variant) for variant in variants]
    check_prompt(model, study.length + study.steps)
    records: dict[Variant, list[Record]] = {variant: [] for variant in wanted}
    for kind, seed in study.cells:
        settings = {variant: _setting(same, study, variant, kind, seed) for variant in records}
        missing = {variant: setting for variant, setting in settings.items() if known.get(setting) is None}
        if missing:
            passage = PASSAGES[kind](tokenizer, length=study.length, steps=study.steps, seed=seed, text=study.text)
            for record in _watch(model, study, passage, missing):
                known.add(record)
        for variant, setting in settings.items():
            records[variant] += filter(None, [known.get(setting)])
    return [summarize(study, records[variant]) for variant in wanted]


def _setting(same: Mapping[str, str], study: Study, variant: Variant, kind: str, seed: int) -> Setting:
    return {
        **same,
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


def _watch(model: PreTrainedModel, study: Study, passage: Passage, settings: dict[Variant, Setting]) -> Iterator[Record]:
    """Prefill a passage once, then fork for each variant.

    bins: steps in order, cut into Study.bins parts. layers: by the layer's number, of those under the method. held_budget: the
    promise that the cache kept. seconds: for indexing and steps, without the probe's.
    """
    base, rest = whole(model, settings), passage.rest
    logits = prefill(model, base, passage.prompt)
    if study.follow == "full":
        how = Sampling(study.temperature, seed=next(iter(settings.values()))["seed"])
        rest = list(generate(model, base.fork("full"), logits, limit=len(rest), sampling=how))
    for variant, setting in settings.items():
        start, cache = now(model.device), fork(base, variant)
        probe = Probe(cache, every=study.probe, reference=base)
        for _ in feed(model, cache, rest):
            pass
        seconds = now(model.device) - start - probe.seconds
        probe.detach()
        seen, first = probe.observations, len(passage.prompt) + 1
        bins = [[one for one in seen if (one.length - first) * study.bins // len(rest) == i] for i in range(study.bins)]
        layers = {number: [one for one in seen if one.layer == number] for number in sorted({one.layer for one in seen})}
        measures = {
            "prompt": len(passage.prompt),
            "steps": len(rest),
            "held_budget": cache.stats().budget,
            "bins": [asdict(Quality.of(of)) for of in bins],
            "layers": {str(number): asdict(Quality.of(of)) for number, of in layers.items()},
            "seconds": seconds,
            "versions": versions(),
        }
        yield Record(setting, measures)
        del cache, probe  # its host rows go before the next one's come


def summarize(study: Study, records: Sequence[Record]) -> Summary:
    """Pool the records of a variant, to six digits: over everything, by kind of prompt, quarter and bin of the steps, and layer.
    Where a number of rows was asked for, their recall also stands under recall_at_<number>."""
    first, bins = records[0], list(zip(*(record["bins"] for record in records), strict=True))
    quarter, count = len(bins) // 4, first.setting["retrieved"]
    edges = [i * study.steps // len(bins) for i in range(len(bins) + 1)]

    def pooled(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        quality = with_shares(Quality.pooled([Quality(**part) for part in parts]))
        found = {name: None if value is None else round(value, 6) for name, value in quality.items()}
        return found if count is None else found | {f"recall_at_{count}": found["recall_at_rows"]}

    def among(some: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        return pooled([part for parts in some for part in parts])

    return {
        **{name: value for name, value in first.setting.items() if name not in ("kind", "options")},
        "samples": len(records),
        **shared(records, "held_budget"),
        **among(bins),
        "kinds": {kind: among(one["bins"] for one in records if one["kind"] == kind) for kind in study.kinds},
        "quarters": [among(bins[i * quarter : (i + 1) * quarter]) for i in range(4)] if quarter else [],
        "bins": [{"first": edges[i], "stop": edges[i + 1], **pooled(parts)} for i, parts in enumerate(bins)],
        "layers": [{"layer": int(n), **pooled([one["layers"][n] for one in records])} for n in first["layers"]],
        "seconds": sum(record["seconds"] for record in records),
        **shared(records, "versions"),
    }


def with_shares(quality: Quality) -> dict[str, Any]:
    """Return a quality's fields and its masses as shares of what the exact top-n would give: mass_of_exact with sink, window and
    buffer counted in both, retrieved_of_exact in neither, which is stricter; ceiling_of_exact of the best n candidates."""
    held = quality.held_mass or 0.0
    shares = {
        "mass_of_exact": _share(quality.attention_mass, quality.exact_mass),
        "retrieved_of_exact": _share(quality.attention_mass, quality.exact_mass, less=held),
        "ceiling_of_exact": _share(quality.ceiling_mass, quality.exact_mass),
    }
    return asdict(quality) | shares


def _share(part: float | None, whole: float | None, less: float = 0.0) -> float | None:
    return (part - less) / (whole - less) if part is not None and whole is not None and whole != less else None


def recall_lines(summaries: Sequence[Summary], path: Path) -> None:
    """Recall and share of the exact mass against the rows selected, a line a method, where a method has several budgets; else by
    layer."""
    groups: dict[tuple[str, int, int], list[Summary]] = {}
    for one in summaries:
        groups.setdefault((one["method"], one["length"], one["dense_layers"]), []).append(one)
    several = any(len(group) > 1 for group in groups.values())
    curves: dict[str, list[tuple[float, Summary]]] = {}
    for (method, length, _), group in groups.items():
        if several:
            known = [(one["rows"], one) for one in group if one["rows"] is not None]
            curves[f"{method}, {length:,}"] = sorted(known, key=lambda point: float(point[0]))
        else:
            curves[f"{_named(group[0])}, {length:,}"] = [(part["layer"], part) for part in group[0]["layers"]]
    _panels(curves, "rows selected" if several else "layer", path, title="selections beside exact attention")


def drift_lines(summaries: Sequence[Summary], path: Path) -> None:
    """Recall and share of the exact mass by decode position, a line a variant."""
    curves = {_named(one): [((part["first"] + part["stop"]) / 2, part) for part in one["bins"]] for one in summaries}
    _panels(curves, "tokens after the prompt", path, title=f"drift after a prompt of {summaries[0]['length']:,} tokens")


def _named(one: Summary) -> str:
    return Variant.of(one).label


def _panels(curves: Mapping[str, Sequence[tuple[float, Summary]]], across: str, path: Path, *, title: str) -> None:
    figure = plot.new(15, 4.4)
    panels = figure.subplots(1, 3)
    measures = (
        ("recall_at_rows", "ceiling", "recall of the exact rows"),
        ("mass_of_exact", "ceiling_of_exact", "mass, of exact"),
        ("attention_mass", "ceiling_mass", "attention mass (full attention: 1)"),
    )
    for axis, (field, ceiling, label) in zip(panels, measures, strict=True):
        for number, (legend, points) in enumerate(curves.items()):
            for of, look in ((field, {"marker": "o", "markersize": 3, "label": legend}), (ceiling, {"linestyle": ":"})):
                values = [float("nan") if part[of] is None else part[of] for _, part in points]
                axis.plot([place for place, _ in points], values, color=f"C{number % 10}", **look)
                if of == ceiling and any(value == value for value in values):
                    axis.set_title("dotted: the ceiling that the candidates set", fontsize=8)
        axis.set_xlabel(across)
        axis.set_ylabel(label)
    panels[2].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    plot.save(figure, path)


@registered()
def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("recall", "drift"))
    words = {"model": "shipped", "method": "pariskv", "budget": None, "retrieved": None, "prompt": "text,needle"}
    for name, default in (words | {"dense-layers": "auto", "length": None, "follow": "text"}).items():
        parser.add_argument(f"--{name}", default=default)
    for name, value in {"samples": 1, "steps": None, "probe": None, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--temperature", type=float, default=1.0)
    for name in ("text", "out", "plot"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args(arguments)
    plot.check(given.plot)
    drift = given.kind == "drift"
    rows = "100" if drift and given.budget is None and given.retrieved is None else given.retrieved
    budget, retrieved, dense = (None if one is None else [one] for one in (given.budget, rows, given.dense_layers))
    variants = VariantOptions([given.method], None, budget, retrieved, dense).variants()
    text = None if given.text is None else given.text.read_text(encoding="utf-8")
    lengths = [int(part) for part in (given.length or ("8192" if drift else "4096")).split(",")]
    how: dict[str, Any] = {"samples": given.samples, "seed": given.seed, "text": text, "kinds": tuple(given.prompt.split(","))}
    if drift:
        how |= {"kinds": ("text",), "follow": given.follow, "temperature": given.temperature}
    steps, probe = (4096, 16) if drift else (32, 1)
    studies = [Study(length, given.steps or steps, probe=given.probe or probe, **how) for length in lengths]
    loaded, known = load(given.model), ResultsFile(given.out)
    summaries = [one for study in studies for one in run(*loaded, known, study, variants, given.model)]
    for one in summaries:
        print(json.dumps({"eval": given.kind} | one), flush=True)
    if given.plot is not None:
        (drift_lines if drift else recall_lines)(summaries, given.plot)


if __name__ == "__main__":
    run_as_script(main)
