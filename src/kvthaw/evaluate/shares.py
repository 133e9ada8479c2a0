"""PRKV's automatic static share (appendix G), by prompt length and rows: what `kvthaw eval shares` prints."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError, one_of
from kvthaw.evaluate.decode import check_prompt, prefill
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity, versions
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.passages import PASSAGES, Kind, text_name
from kvthaw.evaluate.results import AsLine, Kept, OfModel
from kvthaw.index.hybrid import HybridIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Setting(OfModel):
    """All that a line depends on. rows: the paper's k, which the index may bring; dense_layers: None is the model's default."""

    kind: str
    text: str
    length: int
    seed: int
    rows: int
    page: int
    window: int
    dense_layers: int | None


@dataclass(frozen=True, slots=True)
class Line(AsLine):
    """The share of one prompt. layers: the share that each layer chose, by its number."""

    setting: Setting
    prompt: int
    layers: dict[int, float]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The mean over the layers, S."""
        return sum(self.layers.values()) / len(self.layers)

    @staticmethod
    def from_json(text: str) -> Line:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"] = Setting(**data["setting"])
        data["layers"] = {int(layer): float(share) for layer, share in data["layers"].items()}
        return Line(**data)


@dataclass(frozen=True, slots=True)
class Cell:
    """All prompts of one length and number of rows."""

    length: int
    rows: int
    lines: tuple[Line, ...]

    @property
    def share(self) -> float | None:
        """The mean share, S."""
        return mean(line.share for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON: S, its least and largest over the prompts, and by layer."""
        about = asdict(self.lines[0].setting)
        for name in ("kind", "seed", "length", "rows"):
            del about[name]
        found = [line.share for line in self.lines]
        layers = [{"layer": n, "share": mean(line.layers[n] for line in self.lines)} for n in self.lines[0].layers]
        sizes = {"length": self.length, "rows": self.rows, "samples": len(self.lines)}
        return {
            "eval": "shares",
            **sizes,
            "share": self.share,
            "least": min(found),
            "most": max(found),
            "layers": layers,
            **about,
        }


def shares(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    rows: Sequence[int],
    kinds: Sequence[Kind] = ("text", "needle"),
    samples: int = 1,
    seed: int = 0,
    page: int = 32,
    window: int = 64,
    dense_layers: int | None = None,
    text: str | None = None,
    known: Kept[Line] | None = None,
    name: str = "model",
    progress: Callable[[Progress], None] | None = None,
) -> list[Cell]:
    """S of appendix G for every length and number of rows, in that order. One prefill a prompt serves all rows; what is known is
    not computed. Raises ConfigError for a kind that does not exist, and for a prompt that leaves nothing to retrieve."""
    for kind in kinds:
        one_of(PASSAGES, prompt=kind)
    for length in lengths:
        check_prompt(model, length)
    kept: Kept[Line] = Kept(None, Line.from_json) if known is None else known
    same, tell = identity(model, name) | {"text": text_name(text)}, progress or (lambda _: None)
    prompts = [(length, kind, seed + i) for length in lengths for i in range(samples) for kind in kinds]

    def setting(length: int, kind: str, seed: int, k: int) -> Setting:
        return Setting(**same, kind=kind, length=length, seed=seed, rows=k, page=page, window=window, dense_layers=dense_layers)

    for done, (length, kind, number) in enumerate(prompts):
        tell(Progress(done, len(prompts), 0, 0, "prefill"))
        missing = [k for k in rows if kept.get(setting(length, kind, number, k)) is None]
        if not missing:
            continue
        passage = PASSAGES[kind](tokenizer, length=length, steps=1, seed=number, text=text)
        base = Cache(model, "full")
        prefill(model, base, passage.prompt)
        for k in missing:
            cache = base.fork(f"prkv:share=auto:page={page}:window={window}", retrieved=k, dense_layers=dense_layers)
            cache.wait()
            found = {layer.number: _share(layer.group.index) for layer in cache.frozen_layers if layer.group is not None}
            chosen = {layer: share for layer, share in found.items() if share is not None}
            if len(chosen) < len(found) or not found:
                raise ConfigError(f"length is {length}; with a window of {window} that leaves nothing to retrieve")
            kept.add(Line(setting(length, kind, number, k), len(passage.prompt), chosen, versions()))
            del cache
            gc.collect()  # a cache refers to itself
    tell(Progress(len(prompts), len(prompts), 0, 0, "done"))
    cells = []
    for length in lengths:
        for k in rows:
            lines = [kept.get(setting(length, kind, number, k)) for n, kind, number in prompts if n == length]
            cells.append(Cell(length, k, tuple(line for line in lines if line is not None)))
    return cells


def _share(index: object) -> float | None:
    assert isinstance(index, HybridIndex)
    return index.statics[0].share if index.statics else None
