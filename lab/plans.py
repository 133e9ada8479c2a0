"""The figures of the papers and of the README: of each its settings, what is most telling first, and how it is drawn from lines.

The papers' own numbers are of other machines; what is repeated here are their questions. Lengths are the papers', in multiples of
1,024 tokens. How many steps count is whole periods of what a method does between steps (`_EVERY`), so that its updates are counted
at their share; full attention does nothing between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvthaw.bench.settings import label, possible
from kvthaw.evaluate.results import Record
from kvthaw.formatting import short
from lab.bench.settings import ShapeSetting, setting
from lab.evaluate import plot

FIGURES = {
    "overview": "The README's: full attention, transformers' offloaded cache, pariskv-plus and thaw, 36k to 1M",
    "length": "Time per output token against the length, 36k to 1M",
    "icecache": "IceCache's ways to search at 36k and 128k",
    "baseline": "After a prompt of 36k: transformers' caches, full attention, and methods, eager and captured",
    "text": "Rows that real text chooses, at 36k and 128k",
    "throughput": "Tokens a second against the batch at 128k",
    "clusterkv-ratio": "Latency and throughput beside full attention at 32k (ClusterKV's headline)",
    "prkv-latency": "32k + 512 and 400 + 16k tokens (PRKV, figure 7 left)",
    "pariskv-batches": "64k to 384k tokens by batch (ParisKV, figures 7 and 11)",
}
"""Name -> what it shows and where it comes from."""
_K = 1024
_MOST = 16 * _K
"""Tokens of the longest answer."""
_EVERY = {
    "full": 64,
    "pariskv": 512,
    "pariskv-plus": 512,
    "clusterkv": 320,
    "clusterkv-plus": 320,
    "prkv": 128,
    "prkv-plus": 128,
    "icecache-digest-device": 128,
    "thaw": 192,
}
"""Steps after which a method's updates begin again: ParisKV's buffer, ClusterKV's batch, PRKV's interval, twelve of thaw's."""
_FEW = 48  # of the others, whose rings give 16 tokens at a time
_PARISKV = ("pariskv:retrieved=100", "pariskv-plus:retrieved=100")
_OURS = (_PARISKV[1], "thaw:retrieved=256")
_UNITS = ("clusterkv-plus:budget=1024", "prkv:budget=1024")
_OTHERS = ("clusterkv:budget=1024:hits=0.7", "prkv-plus:budget=1024:hits=0.7", "icecache-digest-device")
_HOST = ("icecache", "icecache-reuse", "icecache-digest", "icecache-digest:reuse=3")


@dataclass(frozen=True, slots=True)
class Figure:
    """shape: its own. runs: its settings. draw: onto a figure of so many inches, from its lines. steps: ways to take steps, tried
    in this order, the first that a method can take counts; eager where none is."""

    shape: str
    runs: Callable[[Common], list[ShapeSetting]]
    draw: Callable[[Any, list[Record]], None]
    size: tuple[float, float] = (7.0, 4.2)
    steps: tuple[str, ...] = ("captured",)


@dataclass(frozen=True, slots=True)
class Common:
    """What all runs of a figure have in common. steps: as in Figure."""

    shape: str
    steps: tuple[str, ...]
    device: str
    cuda: bool
    seed: int

    def run(
        self,
        method: str,
        length: int,
        *,
        batch: int = 1,
        new_tokens: int | None = None,
        prompt: str = "filled",
        shared: bool = False,
    ) -> ShapeSetting:
        """One setting, with the first way to take steps that is possible."""
        count = _EVERY.get(method.partition(":")[0], _FEW) if new_tokens is None else new_tokens
        wanted = {"budget": 256, "retrieved": None, "dense_layers": None, "new_tokens": count, "seed": self.seed}
        rest = {"shape": self.shape, "length": length, "batch": batch, "prompt": prompt, "shared": shared}
        one = setting(method, steps="eager", device=self.device, **wanted, **rest)
        ways = [replace(one, steps=steps) for steps in (*self.steps, "eager")]
        return next(way for way in ways if possible(way, self.cuda) or way.steps == "eager")


def _units(hits: float, more: str = "") -> tuple[str, str]:
    clusters, pages = _UNITS
    return f"{clusters}{more}:hits={hits}", f"{pages}:hits={hits}"


def _length(c: Common) -> list[ShapeSetting]:
    quick = _units(0.7, ":iterations=4")  # k-means of 512k keys takes its time
    others = [one.replace("clusterkv:", "clusterkv:iterations=4:") for one in _OTHERS]
    near = [c.run(m, n * _K) for n in (36, 128) for m in ("full", *_PARISKV, *_units(0.7), *_OTHERS)]
    far = [c.run(m, 512 * _K, shared=m != "full") for m in ("full", *_PARISKV, *quick, *others)]
    missed = [c.run(m, n * _K) for n in (36, 128) for m in _units(0.0)]
    return near + far + missed + [c.run(m, 1024 * _K) for m in (*_PARISKV, *quick)]


def _overview(c: Common) -> list[ShapeSetting]:
    near = ("full", *_OURS, "hf-offloaded")
    return [
        c.run(method, n * _K, new_tokens=8 if method == "hf-offloaded" else None, shared=n >= 512 and method in _OURS)
        for n, methods in ((36, near), (128, near), (512, near), (1024, _OURS))
        for method in methods
    ]


def _draw_length(figure: Any, lines: list[Record]) -> None:
    """Without the steps that find nothing; what took fewer iterations is the same method."""
    shown = [line for line in lines if line.setting["hits"] != 0]
    methods = [line["method"].replace(":iterations=4", "") for line in shown]
    same = [replace(line, setting={**line.setting, "method": name}) for line, name in zip(shown, methods, strict=True)]
    plot.by_length(figure.subplots(), same)


def _icecache(c: Common) -> list[ShapeSetting]:
    methods = ("icecache-digest-device", "icecache-digest-device:reuse=3", *_HOST)
    return [c.run(method, n * _K) for n in (36, 128) for method in methods]


def _draw_lengths(figure: Any, lines: list[Record]) -> None:
    plot.by_length(figure.subplots(), lines)


def _baseline(c: Common) -> list[ShapeSetting]:
    eager = [c.run(m, 36 * _K, new_tokens=_FEW, prompt="run") for m in ("hf-dynamic", "hf-offloaded", "full", *_HOST)]
    captured = [
        c.run(m, 36 * _K, new_tokens=_FEW, prompt="run") for m in (*_HOST, "icecache-digest-device", *_PARISKV, *_UNITS)
    ]
    kept = [replace(one, steps="eager") for one in eager if possible(replace(one, steps="eager"), c.cuda)]
    return list(dict.fromkeys(kept + captured))  # where nothing can be captured the same stand in both


def _draw_baseline(figure: Any, lines: list[Record]) -> None:
    left, right = figure.subplots(1, 2)
    names = [f"{label(line)} ({line['steps']})" for line in lines]
    left.barh(names, [line["tt2t_s"] or 0.0 for line in lines], color="C7", label="until the second token")
    right.barh(names, [1e3 * line["tpot_s"] for line in lines], color="C0", label="each further token")
    left.set(xlabel="seconds")
    right.set(xlabel="ms", yticks=[])
    for axes in (left, right):
        axes.invert_yaxis()
        axes.legend(fontsize=7)
    left.tick_params(axis="y", labelsize=7)


def _text(c: Common) -> list[ShapeSetting]:
    return [c.run(m, n * _K, prompt="text") for n in (36, 128) for m in (*_PARISKV, *_UNITS, "icecache-digest-device")]


def _throughput(c: Common) -> list[ShapeSetting]:
    batches = (("full", (1, 2, 4, 6)), *((m, (1, 8, 24)) for m in _PARISKV))
    return [c.run(method, 128 * _K, batch=batch) for method, rows in batches for batch in rows]


def _clusterkv_ratio(c: Common) -> list[ShapeSetting]:
    method = "clusterkv:budget=1024:hits=0.7"
    runs = (("full", 1), (method, 1), ("full", 24), (method, 24), (method, 48), ("full", 28))
    return [c.run(m, 32 * _K, batch=batch) for m, batch in runs]


def _draw_batch(figure: Any, lines: list[Record]) -> None:
    plot.by_batch(figure.subplots(), lines)


def _pariskv(c: Common) -> list[ShapeSetting]:
    batches = (
        (64, (1, 4, 12), (1, 4, 16)),
        (128, (1, 6), (1, 8)),
        (256, (1, 3), (1, 4)),
        (384, (1, 2), (1, 3)),
    )
    return [
        c.run(method, n * _K, batch=batch, shared=method != "full" and n > 128)
        for n, full, frozen in batches
        for method, rows in (("full", full), *((m, frozen) for m in _PARISKV))
        for batch in rows
    ]


def _draw_batches(figure: Any, lines: list[Record]) -> None:
    found = sorted({line["length"] for line in lines})
    panels = figure.subplots(2, len(found), squeeze=False)
    for column, length in enumerate(found):
        for name, steps, colour, runs in plot.series(lines):
            mine = sorted((r for r in runs if r["length"] == length), key=lambda r: r["batch"])
            x = [r["batch"] for r in mine]
            panels[0][column].plot(x, [r["tokens_per_s"] for r in mine], marker="o", color=colour, label=f"{name} ({steps})")
            panels[1][column].plot(x, [1e3 * r["tpot_s"] for r in mine], marker="o", color=colour)
        panels[0][column].set(title=short(length), ylim=(0, None))
        panels[1][column].set(xlabel="batch, rows", ylim=(0, None))
    panels[0][0].set_ylabel("tokens a second")
    panels[1][0].set_ylabel("time per output token, ms")
    panels[0][0].legend(fontsize=7)


def _prkv(c: Common) -> list[ShapeSetting]:
    methods = ("full", "prkv:budget=1024", "arkvale:budget=1024", "shadowkv:budget=1024")
    prompts = [c.run(method, 32 * _K, new_tokens=512, prompt="run") for method in methods]
    return prompts + [c.run(method, 400 + _MOST // 2, new_tokens=256) for method in methods]


def _draw_prkv(figure: Any, lines: list[Record]) -> None:
    """The long answer's time is that of steps in its middle, as often as it has tokens: a step's time is linear in the length."""
    left, right = figure.subplots(1, 2)
    asked, middle = ([line for line in lines if line["prompt"] == prompt] for prompt in ("run", "filled"))
    _stacked(left, asked, [line["tpot_s"] * line["new_tokens"] for line in asked])
    _stacked(right, middle, [line["tpot_s"] * _MOST for line in middle])
    if asked:
        one = asked[0]
        left.set(title=f"{short(one['length'])} + {short(one['new_tokens'])}")
        left.legend(fontsize=7)
    right.set(title=f"400 + {short(_MOST)}, by steps in its middle")


def _stacked(axes: Any, lines: list[Record], decoding: list[float]) -> None:
    names, prompt = [label(line) for line in lines], [line["ttft_s"] or 0.0 for line in lines]
    axes.barh(names, prompt, label="prompt", color="C7")
    axes.barh(names, decoding, left=prompt, label="decoding", color="C0")
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.tick_params(axis="y", labelsize=6)


_8B = "llama-3.1-8b"
PLANS = {
    "overview": Figure(_8B, _overview, _draw_lengths, steps=("captured",)),
    "length": Figure(_8B, _length, _draw_length, steps=("captured",)),
    "icecache": Figure(_8B, _icecache, _draw_lengths, steps=("captured",)),
    "baseline": Figure(_8B, _baseline, _draw_baseline, (10, 4)),
    "text": Figure(_8B, _text, _draw_lengths, steps=("captured",)),
    "throughput": Figure(_8B, _throughput, _draw_batch),
    "clusterkv-ratio": Figure(_8B, _clusterkv_ratio, _draw_batch),
    "prkv-latency": Figure(_8B, _prkv, _draw_prkv, (9, 3)),
    "pariskv-batches": Figure(_8B, _pariskv, _draw_batches, (13, 6)),
}
"""How each of FIGURES comes about."""
