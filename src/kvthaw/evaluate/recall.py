"""Selections beside exact attention, step by step: what `kvthaw eval recall` and `kvthaw eval drift` run."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.evaluate.decode import Pick, check_prompt, forward, prefill, sampler
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.passages import PASSAGES, Kind, Passage, text_name
from kvthaw.evaluate.probe import Probe, Quality
from kvthaw.evaluate.results import AsLine, Kept, OfVariant
from kvthaw.evaluate.variant import Variant, complete, setting_of
from kvthaw.methods import resolve

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Follow = Literal["text", "full", "own"]
MOST_BINS = 32


@dataclass(frozen=True, slots=True)
class Study:
    """What is watched, under every variant.

    length: tokens of the prompt. steps: tokens sent after it. kinds: "text", "needle"; samples: passages of each. follow: "text"
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
            one_of(PASSAGES, prompt=kind)
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


@dataclass(frozen=True, slots=True)
class Setting(OfVariant):
    """All that a line depends on; two lines of one setting are the same line. text: the hash of the text, "book" for what ships."""

    kind: str
    text: str
    length: int
    steps: int
    seed: int
    probe: int
    follow: str
    temperature: float | None


@dataclass(frozen=True, slots=True)
class Line(AsLine):
    """One passage under one variant.

    prompt: tokens. bins: steps in order, cut into Study.bins parts. layers: by the layer's number, of those under the method;
    heads: of each, its KV heads. held_budget: the promise that the cache kept. prefill_s: shared by all variants; seconds: for
    indexing and steps, without the probe's.
    """

    setting: Setting
    prompt: int
    steps: int
    held_budget: int | None
    bins: tuple[Quality, ...]
    layers: dict[int, Quality]
    heads: dict[int, tuple[Quality, ...]]
    prefill_s: float
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> Line:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"] = Setting(**data["setting"])
        data["bins"] = tuple(Quality(**part) for part in data["bins"])
        data["layers"] = {int(layer): Quality(**part) for layer, part in data["layers"].items()}
        data["heads"] = {int(layer): tuple(Quality(**part) for part in parts) for layer, parts in data["heads"].items()}
        return Line(**data)


@dataclass(frozen=True, slots=True)
class Summary:
    """All lines of one variant. means: over everything; by kind of prompt, by bin of the steps, by layer and by KV head of it."""

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
    def of(study: Study, variant: Variant, lines: Sequence[Line]) -> Summary:
        """Pool the lines of a variant, of one study."""
        first, pool = lines[0], Quality.pooled
        return Summary(
            study,
            variant,
            first.setting,
            len(lines),
            first.held_budget,
            pool([part for line in lines for part in line.bins]),
            {kind: pool([part for line in lines if line.setting.kind == kind for part in line.bins]) for kind in study.kinds},
            tuple(pool(parts) for parts in zip(*(line.bins for line in lines), strict=True)),
            {layer: pool([line.layers[layer] for line in lines]) for layer in first.layers},
            {
                layer: tuple(pool(parts) for parts in zip(*(line.heads[layer] for line in lines), strict=True))
                for layer in first.heads
            },
            sum(line.seconds for line in lines),
            first.versions,
        )

    def quarters(self) -> tuple[Quality, ...]:
        """The steps in four parts; none where fewer were observed."""
        size = len(self.bins) // 4
        return tuple(Quality.pooled(self.bins[i * size : (i + 1) * size]) for i in range(4)) if size else ()

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON, to six digits. Where a number of rows was asked for, their recall also stands under
        recall_at_<number>."""
        setting = asdict(self.setting)
        about = {
            name: setting.pop(name) for name in ("method", "budget", "retrieved", "dense_layers", "length", "steps", "probe")
        }
        setting.pop("kind")
        last = self.study.steps
        edges = [(i * last // len(self.bins), (i + 1) * last // len(self.bins)) for i in range(len(self.bins))]
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
            **setting,
            "versions": self.versions,
        }

    def _named(self, part: Quality) -> dict[str, Any]:
        found = {name: None if value is None else round(value, 6) for name, value in part.to_dict().items()}
        count = self.setting.retrieved
        return found if count is None else found | {f"recall_at_{count}": found["recall_at_rows"]}


class Watcher:
    """A model, and what has been seen of it so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, known: Kept[Line] | None = None, *, name: str = "model") -> None:
        self.model, self.tokenizer = model, tokenizer
        self.known: Kept[Line] = Kept(None, Line.from_json) if known is None else known
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
            passage = PASSAGES[kind](self.tokenizer, length=study.length, steps=study.steps, seed=seed, text=study.text)
            for line in self._lines(study, passage, missing, show):
                self.known.add(line)
                done += 1
        tell(Progress(total, total, 0, 0, "done"))
        summaries = []
        for variant in wanted:
            lines = [self.known.get(self._setting(study, variant, kind, seed)) for kind, seed in cells]
            summaries.append(Summary.of(study, variant, [line for line in lines if line is not None]))
        return summaries

    def _setting(self, study: Study, variant: Variant, kind: str, seed: int) -> Setting:
        return Setting(
            kind=kind,
            text=text_name(study.text),
            length=study.length,
            steps=study.steps,
            seed=seed,
            probe=study.probe,
            follow=study.follow,
            temperature=None if study.follow == "text" else study.temperature,
            **(setting_of(variant) | self._same),
        )

    def _lines(
        self, study: Study, passage: Passage, settings: dict[Variant, Setting], show: Callable[[int, int, str], None]
    ) -> Iterator[Line]:
        """Prefill once, then fork for each variant."""
        base = Cache(self.model, "full")
        start = now(self.model.device)
        logits = prefill(self.model, base, passage.prompt, progress=lambda done, total: show(done, total, "prefill"))
        prefill_s = now(self.model.device) - start
        if study.follow == "full":
            seed = next(iter(settings.values())).seed
            passage = replace(
                passage, rest=self._written(base, logits, len(passage.rest), sampler(study.temperature, seed), show)
            )
        for variant, setting in settings.items():
            doing = f"{variant.method} {variant.budget or variant.retrieved}"
            show(0, len(passage.rest), doing)
            start = now(self.model.device)
            cache = base.fork(variant.method, **_limits(variant))
            cache.wait()
            probe = Probe(cache, every=study.probe, reference=base)
            pick: Pick | None = sampler(study.temperature, setting.seed) if study.follow == "own" else None
            after = logits
            for step, token in enumerate(passage.rest):
                after = forward(self.model, cache, [token if pick is None else pick(after)])
                show(step + 1, len(passage.rest), doing)
            seconds = now(self.model.device) - start - probe.seconds
            probe.detach()
            yield _line(setting, study, passage, cache, probe, prefill_s, seconds)
            del cache, probe
            gc.collect()  # a cache refers to itself; its host rows go before the next one's come

    def _written(self, base: Cache, logits: Tensor, steps: int, pick: Pick, show: Callable[[int, int, str], None]) -> list[int]:
        """What the model writes with full attention after the cache's tokens; the cache stays as it is."""
        cache, written = base.fork("full"), []
        for step in range(steps):
            written.append(pick(logits))
            logits = forward(self.model, cache, written[-1:])
            show(step + 1, steps, "full attention writes")
        return written


def _limits(variant: Variant) -> dict[str, Any]:
    return {"budget": variant.budget, "retrieved": variant.retrieved, "dense_layers": variant.dense_layers}


def _line(
    setting: Setting, study: Study, passage: Passage, cache: Cache, probe: Probe, prefill_s: float, seconds: float
) -> Line:
    seen, before, steps = probe.observations, len(passage.prompt), len(passage.rest)
    numbers = sorted({one.layer for one in seen})
    by_layer = {number: [one for one in seen if one.layer == number] for number in numbers}
    heads = {number: list(zip(*(one.heads() for one in of), strict=True)) for number, of in by_layer.items()}
    bins = [(one.length - before - 1) * study.bins // steps for one in seen]
    return Line(
        setting=setting,
        prompt=before,
        steps=steps,
        held_budget=cache.stats().budget,
        bins=tuple(Quality.of([one for one, at in zip(seen, bins, strict=True) if at == i]) for i in range(study.bins)),
        layers={number: Quality.of(of) for number, of in by_layer.items()},
        heads={number: tuple(Quality.of(of) for of in parts) for number, parts in heads.items()},
        prefill_s=prefill_s,
        seconds=seconds,
        versions=versions(),
    )
