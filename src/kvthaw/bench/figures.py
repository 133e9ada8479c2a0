"""The figures of the papers and of the README: each a list of runs of the decode benchmark and a plot drawn from its lines
(`kvthaw.bench.plans`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvthaw.bench import report, room
from kvthaw.bench.asked import FIGURES, Figures
from kvthaw.bench.decode import Bench, Watch, name_of, where
from kvthaw.bench.lines import Line, Lines
from kvthaw.bench.options import read_pairs
from kvthaw.bench.plans import PLANS, Common
from kvthaw.bench.script import noted, printing, run_as_script
from kvthaw.bench.settings import Setting
from kvthaw.errors import ConfigError, at_least, unknown


def main(
    options: Figures,
    *,
    say: Callable[[Line], None] | None = None,
    watch: Watch | None = None,
    note: Callable[[str], None] = noted,
) -> dict[str, list[Line]]:
    """Measure the figures' runs, those that stand in the file not again, and draw them. Returns lines by figure.

    note: is told which runs do not fit on the machine, which failed, and what was drawn. Where the host is too small, layers share
    their rows there; what does not fit so either is left out. Raises ConfigError for a name that is not in FIGURES, for shrink
    below 1, and where there is nothing to draw from; and at the end, when what came out is drawn, what a run failed with.
    """
    names = options.name or tuple(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise unknown("name", name, FIGURES)
    at_least(1, shrink=options.shrink)
    if options.draw and (options.out is None or options.plot is None):
        raise ConfigError("draw=1 needs out, the file with the lines, and plot, the folder to draw into")
    if options.plot is not None:
        options.plot.mkdir(parents=True, exist_ok=True)
        report.check(options.plot / "any.png")
    known = Lines(options.out)
    bench: Bench | None = None
    if options.draw:
        found = {name: drawn for name in names if (drawn := known_lines(name, known, options))}
        if not found:
            raise ConfigError(f"out is {str(options.out)!r}, which holds no line of {', '.join(names)}")
    else:
        bench = Bench(known, commit=options.commit, host_bytes=options.host_bytes)
        found = _measured(names, bench, options, say, watch, note)
    for name, lines in found.items():
        if options.plot is not None and lines:
            figure = report.figure(*PLANS[name].size)
            PLANS[name].draw(figure, lines)
            where_from = lines[0].setting
            missing = _missing(name, options, lines)
            if missing:
                note("\n".join([f"{name} is drawn without", *(f"  {one}" for one in missing)]))
            short = f"; {len(missing)} runs missing" if missing else ""
            figure.suptitle(f"{FIGURES[name]}; {where_from.shape}, {where_from.device}{short}", fontsize=9)
            report.save(figure, options.plot / f"{name}.png")
            note(f"wrote {options.plot / name}.png")
    if bench is not None:
        bench.judge()
    return found


def grid(name: str, options: Figures, device: str) -> list[Setting]:
    """The runs of a figure on a device."""
    figure = PLANS[name]
    common = Common(options.shape or figure.shape, options.steps or figure.steps, device, device != "cpu", options.seed)
    return [_shrunk(one, options.shrink) for one in figure.runs(common)]


def known_lines(name: str, known: Lines, options: Figures) -> list[Line]:
    """What of a figure stands in a file, of whatever device."""
    devices = dict.fromkeys(line.setting.device for line in known)
    asked = [way for device in devices for one in grid(name, options, device) for way in _ways(one)]
    return [line for one in dict.fromkeys(asked) if (line := known.get(one)) is not None]


def _missing(name: str, options: Figures, lines: Sequence[Line]) -> list[Setting]:
    """The runs of a figure that have no line, of the device of the first."""
    there = {line.setting for line in lines}
    return [one for one in grid(name, options, lines[0].setting.device) if there.isdisjoint(_ways(one))]


def _ways(one: Setting) -> list[Setting]:
    """A run, and where its host memory may not suffice, the same with layers that share their rows there."""
    can = one.prompt != "run" and not (one.hf or one.dense or one.shared)
    return [one, replace(one, shared=True)] if can else [one]


def _measured(
    names: Sequence[str],
    bench: Bench,
    options: Figures,
    say: Callable[[Line], None] | None,
    watch: Watch | None,
    note: Callable[[str], None],
) -> dict[str, list[Line]]:
    device, dtype = where()
    found: dict[str, list[Line]] = {}
    for name in names:
        fits = []
        for one in grid(name, options, name_of(device)):
            ways = _ways(one)
            for way in ways:
                try:
                    if bench.known.get(way) is None:
                        room.check(way, device, dtype, options.host_bytes)
                    fits.append(way)
                    break
                except ConfigError as error:
                    note(f"{'left out' if way is ways[-1] else 'layers have to share the rows'}: {error}")
        found[name] = bench.run(fits, say=say, watch=watch, note=note)
    return found


def _shrunk(one: Setting, by: int) -> Setting:
    if by == 1:
        return one
    budget = None if one.budget is None else max(32, int(one.budget) // by)
    retrieved = None if one.retrieved is None else max(8, one.retrieved // by)
    length, tokens = max(16, one.length // by), max(8, one.new_tokens // by)
    return replace(one, budget=budget, retrieved=retrieved, length=length, new_tokens=tokens)


if __name__ == "__main__":
    asked = read_pairs(Figures, sys.argv[1:])
    run_as_script(lambda: main(asked, **printing(asked.out)))
