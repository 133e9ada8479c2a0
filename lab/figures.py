"""Measure and draw the figures of the papers and of the README (`lab.plans`).

usage: python3 -m lab.figures [NAME,NAME... [--methods METHOD,...] [--shape SHAPE] [--shrink N] [--out FILE] [--plot FOLDER]
[--draw] [--profile]]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError, at_least, unknown
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import Record, ResultsFile, noted
from lab.bench.settings import ShapeSetting
from lab.evaluate import plot
from lab.filled import FilledBench
from lab.plans import FIGURES, PLANS, Common
from lab.script import printing, run_as_script


@dataclass(frozen=True, slots=True)
class Options:
    """names: of FIGURES, all unless given. methods: the runs of these alone. shape, steps: other than the figure's own. shrink:
    divides lengths, tokens and budgets, to try a figure on a small machine. out: the file of records; what is there is not
    measured again. plot: the folder to draw NAME.png into. draw: only draw, from the file. profile: break captured steps of one run
    down by kernels; nothing is timed after it in the same process."""

    names: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    shape: str | None = None
    steps: tuple[str, ...] = ()
    shrink: int = 1
    out: Path | None = None
    plot: Path | None = None
    draw: bool = False
    profile: bool = False
    host_bytes: int | None = None
    seed: int = 0
    commit: str | None = None


def main(options: Options, **how: Any) -> dict[str, list[Record]]:
    """Measure the figures' runs, those that stand in the file not again, and draw them. Returns records by figure.

    how: say, watch and note as for `Bench`. Where the host is too small, layers share their rows there; what does not fit so either
    is left out. Raises ConfigError for a name that is not in FIGURES, for shrink below 1, and where there is nothing to draw from;
    and at the end, when what came out is drawn, what a run failed with.
    """
    names = options.names or tuple(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise unknown("name", name, FIGURES)
    at_least(1, shrink=options.shrink)
    if options.draw and (options.out is None or options.plot is None):
        raise ConfigError("draw=1 needs out, the file with the lines, and plot, the folder to draw into")
    if options.plot is not None:
        options.plot.mkdir(parents=True, exist_ok=True)
        plot.check(options.plot / "any.png")
    known, note = ResultsFile(options.out), how.get("note", noted)
    bench: FilledBench | None = None
    if options.draw:
        found = {name: drawn for name in names if (drawn := known_records(name, known, options))}
        if not found:
            raise ConfigError(f"out is {str(options.out)!r}, which holds no line of {', '.join(names)}")
    else:
        bench = FilledBench(known, commit=options.commit, host_bytes=options.host_bytes, **how)
        bench.profile, found = options.profile, {}
        for name in names:
            settings = [next((way for way in ways(one) if bench.fits(way)), None) for one in grid(name, options, where()[1])]
            fitting = [one for one in settings if one is not None]
            found[name] = bench.run(fitting) if fitting else []
    for name, records in found.items():
        if options.plot is not None and records:
            draw(name, records, options, note)
    if bench is not None:
        bench.judge()
    return found


def draw(name: str, records: list[Record], options: Options, note: Callable[[str], None]) -> None:
    """Draw a figure into its file, and say which runs are missing."""
    assert options.plot is not None
    figure, first = plot.new(*PLANS[name].size), records[0]
    PLANS[name].draw(figure, records)
    there = {ShapeSetting(**record.setting) for record in records}
    missing = [one for one in grid(name, options, first["device"]) if there.isdisjoint((*ways(one), *earlier(one)))]
    if missing:
        note("\n".join([f"{name} is drawn without", *(f"  {one}" for one in missing)]))
    short = f"; {len(missing)} runs missing" if missing else ""
    figure.suptitle(f"{FIGURES[name]}; {first['shape']}, {first['device']}{short}", fontsize=9)
    plot.save(figure, options.plot / f"{name}.png")
    note(f"wrote {options.plot / name}.png")


def grid(name: str, options: Options, device: str) -> list[ShapeSetting]:
    """The runs of a figure on a device."""
    figure = PLANS[name]
    common = Common(options.shape or figure.shape, options.steps or figure.steps, device, device != "cpu", options.seed)
    runs = [one for one in figure.runs(common) if not options.methods or one.method.partition(":")[0] in options.methods]
    return [_shrunk(one, options.shrink) for one in runs]


def known_records(name: str, known: ResultsFile, options: Options) -> list[Record]:
    """What of a figure stands in a file, of whatever device."""
    devices = dict.fromkeys(str(record["device"]) for record in known)
    asked = dict.fromkeys(one for device in devices for one in grid(name, options, device))
    found = ([line for way in (*ways(one), *earlier(one)) if (line := known.get(way.to_dict()))] for one in asked)
    return [lines[0] for lines in found if lines]


def ways(one: ShapeSetting) -> list[ShapeSetting]:
    """A run, and where its host memory may not suffice, the same with layers that share their rows there."""
    can = one.prompt != "run" and not (one.hf or one.dense or one.shared)
    return [one, replace(one, shared=True)] if can else [one]


def earlier(one: ShapeSetting) -> list[ShapeSetting]:
    """A run as lines have it whose steps torch compiled, before kvthaw's own kernels were faster."""
    return [replace(way, steps="compiled") for way in ways(one)] if one.steps == "captured" else []


def _shrunk(one: ShapeSetting, by: int) -> ShapeSetting:
    if by == 1:
        return one
    budget = None if one.budget is None else max(32, int(one.budget) // by)
    retrieved = None if one.retrieved is None else max(8, one.retrieved // by)
    length, tokens = max(16, one.length // by), max(8, one.new_tokens // by)
    return replace(one, budget=budget, retrieved=retrieved, length=length, new_tokens=tokens)


def options_of(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="\n".join(f"{name}: {text}" for name, text in FIGURES.items()))
    parser.add_argument("names", nargs="?", default="")
    for name in ("methods", "shape", "steps", "commit"):
        parser.add_argument(f"--{name}")
    for name in ("out", "plot"):
        parser.add_argument(f"--{name}", type=Path)
    for name, default in (("shrink", 1), ("host-bytes", None), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("draw", "profile"):
        parser.add_argument(f"--{name}", action="store_true")
    given = vars(parser.parse_args(arguments))
    listed = {name: tuple(filter(None, (given[name] or "").split(","))) for name in ("names", "methods", "steps")}
    return Options(**{**given, **listed})


if __name__ == "__main__":
    asked = options_of()
    run_as_script(lambda: main(asked, **printing(asked.out)))
