"""The figures of the papers and of the README: each a list of runs of the decode benchmark and a plot drawn from its lines.

The papers' own numbers are of other machines; what is repeated here are their questions. Lengths are the papers', in
multiples of 1,024 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvthaw.bench import report, room
from kvthaw.bench.asked import FIGURES, Figures
from kvthaw.bench.decode import Bench, Watch, name_of, where
from kvthaw.bench.lines import Line, Lines
from kvthaw.bench.options import read_pairs
from kvthaw.bench.script import run_as_script
from kvthaw.bench.settings import Setting, possible, setting
from kvthaw.errors import ConfigError, unknown

_K = 1024
_SPARSE = ("pariskv:retrieved=100", "clusterkv:budget=1024:hits=0.7", "prkv:budget=1024:hits=0.7")
_MOST = 16 * _K
"""Tokens to decode in the longest figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """shape: its own. runs: its settings. draw: onto a figure of so many inches, from its lines."""

    shape: str
    runs: Callable[[Common], list[Setting]]
    draw: Callable[[Any, list[Line]], None]
    size: tuple[float, float] = (7.0, 4.2)


@dataclass(frozen=True, slots=True)
class Common:
    """What all runs of a figure have in common. steps: tried in this order, the first that a method can take counts."""

    shape: str
    steps: tuple[str, ...]
    device: str
    cuda: bool
    seed: int

    def run(
        self, method: str, length: int, *, batch: int = 1, new_tokens: int = 512, prompt: str = "filled", shared: bool = False
    ) -> Setting:
        """One setting, with the first way to take steps that is possible."""
        wanted = {"budget": 256, "retrieved": None, "dense_layers": None, "hits": None, "new_tokens": new_tokens}
        rest = {"shape": self.shape, "length": length, "batch": batch, "prompt": prompt, "shared": shared}
        one = setting(method, wanted, steps="eager", seed=self.seed, device=self.device, **rest)
        ways = [replace(one, steps=steps) for steps in (*self.steps, "eager")]
        return next(way for way in ways if possible(way, self.cuda) or way.steps == "eager")


def _icecache_memory(c: Common) -> list[Setting]:
    sparse = ("icecache", "icecache-reuse", "omnikv", "arkvale", "pqcache", "magicpig", "quest", "streaming", "snapkv")
    return [c.run(method, 36 * _K, new_tokens=64) for method in ("full", *sparse)]


def _draw_memory(figure: Any, lines: list[Line]) -> None:
    axes = figure.subplots()
    for name, steps, colour, runs in report.series(lines):
        x = [(r.kv_device_bytes + r.index_device_bytes + r.kv_dense_bytes) / 2**20 for r in runs]
        axes.plot(x, [1e3 * r.tpot_s for r in runs], "o", color=colour, label=f"{name} ({steps})")
        for place, run in zip(x, runs, strict=True):
            axes.annotate(run.setting.method, (place, 1e3 * run.tpot_s), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(xscale="log", xlabel="KV and index on the device, MiB", ylabel="time per output token, ms", ylim=(0, None))
    axes.legend(fontsize=7)


def _icecache_scaling(c: Common) -> list[Setting]:
    methods = ("full", "icecache", "icecache-reuse")
    return [c.run(m, n * _K, new_tokens=64, shared=m != "full") for n in (150, 200, 250, 300) for m in methods]


def _draw_length(figure: Any, lines: list[Line]) -> None:
    report.by_length(figure.subplots(), lines)


def _pariskv(c: Common) -> list[Setting]:
    batches = ((64, (1, 2, 4, 8, 12, 16)), (128, (1, 2, 4, 6, 8, 12)), (256, (1, 2, 3, 4, 5)), (384, (1, 2, 3)))
    return [
        c.run(method, n * _K, batch=batch, shared=method != "full", new_tokens=128)
        for n, rows in batches
        for batch in rows
        for method in ("full", "pariskv:retrieved=100")
    ]


def _draw_batches(figure: Any, lines: list[Line]) -> None:
    found = sorted({line.setting.length for line in lines})
    panels = figure.subplots(2, len(found), squeeze=False)
    for column, length in enumerate(found):
        for name, steps, colour, runs in report.series(lines):
            mine = sorted((r for r in runs if r.setting.length == length), key=lambda r: r.setting.batch)
            x = [r.setting.batch for r in mine]
            panels[0][column].plot(x, [r.tokens_per_s for r in mine], marker="o", color=colour, label=f"{name} ({steps})")
            panels[1][column].plot(x, [1e3 * r.tpot_s for r in mine], marker="o", color=colour)
        panels[0][column].set(title=report.short(length), ylim=(0, None))
        panels[1][column].set(xlabel="batch, rows", ylim=(0, None))
    panels[0][0].set_ylabel("tokens a second")
    panels[1][0].set_ylabel("time per output token, ms")
    panels[0][0].legend(fontsize=7)


def _clusterkv(c: Common) -> list[Setting]:
    # the hit rates that the paper reports for R = 1 and 2; without a cache of rows there are none
    kept = ("keep=0", "keep=1:hits=0.63", "keep=2:hits=0.74")
    methods = ("full", *(f"clusterkv:budget={budget}:{how}" for budget in (1024, 2048) for how in kept))
    return [c.run(method, n * _K, new_tokens=1024, prompt="run") for n in (8, 16, 32) for method in methods]


def _prkv(c: Common) -> list[Setting]:
    methods = ("full", "prkv:budget=1024", "arkvale:budget=1024", "shadowkv:budget=1024")
    return [
        c.run(method, length, new_tokens=tokens, prompt="run")
        for length, tokens in ((32 * _K, 512), (400, _MOST))
        for method in methods
    ]


def _draw_latency(figure: Any, lines: list[Line], marks: int) -> None:
    """Prefill and decoding stacked, a panel a prompt and number of tokens decoded: all of them, half, a quarter ... in
    `marks` panels."""
    cases = list(dict.fromkeys((r.setting.length, n) for r in lines for n in sorted(map(int, r.elapsed_s))[-marks:]))
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, (length, tokens) in zip(panels, cases, strict=True):
        mine = [line for line in lines if line.setting.length == length and str(tokens) in line.elapsed_s]
        names = [report.label(line) for line in mine]
        prompt = [line.ttft_s or 0.0 for line in mine]
        axes.barh(names, prompt, label="prompt", color="C7")
        axes.barh(names, [line.elapsed_s[str(tokens)] for line in mine], left=prompt, label="decoding", color="C0")
        axes.invert_yaxis()
        axes.set(title=f"{report.short(length)} + {report.short(tokens)}", xlabel="seconds")
        axes.tick_params(axis="y", labelsize=6, labelleft=axes is panels[0])
    panels[0].legend(fontsize=7)


def _length(c: Common) -> list[Setting]:
    quick = [method.replace("clusterkv", "clusterkv:iterations=4") for method in _SPARSE]  # k-means of 512k keys takes its time
    return [
        c.run(method, n * _K, shared=method != "full" and n > 256, new_tokens=256)
        for n in (8, 36, 64, 128, 256, 512)
        for method in ("full", *(quick if n > 256 else _SPARSE))
    ]


def _throughput(c: Common) -> list[Setting]:
    methods = (("full", (1, 2, 4, 6)), ("pariskv:retrieved=100", (1, 2, 4, 8, 16, 24)))
    return [c.run(m, 128 * _K, batch=b, shared=m != "full", new_tokens=128) for m, rows in methods for b in rows]


def _draw_batch(figure: Any, lines: list[Line]) -> None:
    report.by_batch(figure.subplots(), lines)


PLANS = {
    "length": Figure("llama-3.1-8b", _length, _draw_length),
    "throughput": Figure("llama-3.1-8b", _throughput, _draw_batch),
    "icecache-memory": Figure("llama-3.1-8b", _icecache_memory, _draw_memory),
    "icecache-scaling": Figure("qwen3-4b", _icecache_scaling, _draw_length),
    "pariskv-batches": Figure("llama-3.1-8b", _pariskv, _draw_batches, (13, 6)),
    "clusterkv-latency": Figure("llama-3.1-8b", _clusterkv, partial(_draw_latency, marks=3), (20, 4)),
    "prkv-latency": Figure("llama-3.1-8b", _prkv, partial(_draw_latency, marks=1), (9, 3)),
}
"""How each of `kvthaw.bench.asked.FIGURES` comes about."""


def main(
    options: Figures,
    *,
    say: Callable[[Line], None] | None = None,
    watch: Watch | None = None,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, list[Line]]:
    """Measure the figures' runs, those that stand in the file not again, and draw them. Returns lines by figure.

    note: is told which runs do not fit on the machine; they are left out. Raises ConfigError for a name that is not in
    FIGURES, for shrink below 1, and where there is nothing to draw from.
    """
    names = options.name or tuple(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise unknown("name", name, FIGURES)
    if options.shrink < 1:
        raise ConfigError(f"shrink is {options.shrink}; it must be at least 1")
    if options.draw and (options.out is None or options.plot is None):
        raise ConfigError("draw=1 needs out, the file with the lines, and plot, the folder to draw into")
    if options.plot is not None:
        report.check(options.plot / "any.png")
    known = Lines(options.out)
    if options.draw:
        found = {name: drawn for name in names if (drawn := known_lines(name, known, options))}
        if not found:
            raise ConfigError(f"out is {str(options.out)!r}, which holds no line of {', '.join(names)}")
    else:
        found = _measured(names, known, options, say, watch, note)
    for name, lines in found.items():
        if options.plot is not None and lines:
            figure = report.figure(*PLANS[name].size)
            PLANS[name].draw(figure, lines)
            where_from = lines[0].setting
            figure.suptitle(f"{FIGURES[name]}; {where_from.shape}, {where_from.device}", fontsize=9)
            report.save(figure, options.plot / f"{name}.png")
    return found


def grid(name: str, options: Figures, device: str) -> list[Setting]:
    """The runs of a figure on a device."""
    figure = PLANS[name]
    common = Common(options.shape or figure.shape, options.steps, device, device != "cpu", options.seed)
    return [_shrunk(one, options.shrink) for one in figure.runs(common)]


def known_lines(name: str, known: Lines, options: Figures) -> list[Line]:
    """What of a figure stands in a file, of whatever device."""
    devices = dict.fromkeys(line.setting.device for line in known)
    return [line for device in devices for one in grid(name, options, device) if (line := known.get(one)) is not None]


def _measured(
    names: Sequence[str],
    known: Lines,
    options: Figures,
    say: Callable[[Line], None] | None,
    watch: Watch | None,
    note: Callable[[str], None],
) -> dict[str, list[Line]]:
    device, dtype = where()
    found: dict[str, list[Line]] = {}
    bench: Bench | None = None
    for name in names:
        fits = []
        for one in grid(name, options, name_of(device)):
            try:
                if known.get(one) is None:
                    room.check(one, device, dtype, options.host_bytes)
                fits.append(one)
            except ConfigError as error:
                note(f"left out: {error}")
        bench = bench or Bench(known, commit=options.commit, host_bytes=options.host_bytes)
        found[name] = bench.run(fits, say=say, watch=watch)
    return found


def _shrunk(one: Setting, by: int) -> Setting:
    if by == 1:
        return one
    budget = None if one.budget is None else max(32, int(one.budget) // by)
    retrieved = None if one.retrieved is None else max(8, one.retrieved // by)
    length, tokens = max(16, one.length // by), max(8, one.new_tokens // by)
    return replace(one, budget=budget, retrieved=retrieved, length=length, new_tokens=tokens)


if __name__ == "__main__":
    run_as_script(lambda: main(read_pairs(Figures, sys.argv[1:]), say=lambda line: print(line.to_json(), flush=True)))
