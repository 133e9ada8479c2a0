"""A table or figure of a paper: what the paper says, how it is measured, and what comes out of it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvthaw.errors import ConfigError
from lab.ablations import registered
from lab.evaluate.published import BENCHMARKS

if TYPE_CHECKING:
    from lab.reproduce.lab import Lab

Value = float | str | None
"""A number, a word in its place such as OOM, or nothing."""
_PAPERS = Path(__file__).parent / "papers"


@dataclass(frozen=True, slots=True)
class Table:
    """What a paper says.

    rows: a method with its options -> its values by column.
    """

    columns: tuple[str, ...]
    rows: dict[str, dict[str, Value]]


def table(text: str) -> Table:
    """Read a table: a line of columns, then lines of a row's name and its values; "-" is no value, and a bare name has none."""
    (columns, *lines) = [line.split() for line in text.strip().splitlines() if line.strip()]
    found: dict[str, dict[str, Value]] = {}
    for name, *given in lines:
        values = given or ["-"] * len(columns)
        if name in found or len(values) != len(columns):
            raise ValueError(f"{name} has {len(values)} values for {len(columns)} columns, or stands there twice")
        found[name] = dict(zip(columns, map(_value, values), strict=True))
    return Table(tuple(columns), found)


def _value(text: str) -> Value:
    try:
        return None if text == "-" else float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of ours, and what it was measured on.

    parts: by depth, where samples have one.
    """

    value: Value
    on: str
    parts: Mapping[float, float] = field(default_factory=dict)


Cells = dict[tuple[str, str], Cell]
"""(row, column) -> what was measured."""


class Measurement(Protocol):
    """How the numbers of a table are measured."""

    @property
    def needs(self) -> str:
        """What a user brings to a run that is not quick."""

    @property
    def columns(self) -> Collection[str]:
        """What is measured."""

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        """Return what was measured of rows; cells that cannot be are missing. What the lab's results hold is not measured again."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """name: the paper's and its table or figure, such as icecache-t1.

    says: the paper's model or machine -> its numbers; the first is taken for any other model.
    unit: of the numbers.
    form: one of `lab.reproduce.draw.FORMS`.
    minutes: expected on one H100, roughly.
    note: what else a reader of the two numbers must know.
    """

    name: str
    title: str
    source: str
    says: Mapping[str, Table]
    plan: Measurement
    unit: str
    form: str = "bars"
    minutes: float = 10
    note: str = ""

    def __post_init__(self) -> None:
        for said in self.says.values():
            unknown = set(said.columns) - set(self.plan.columns)
            if unknown:
                raise ValueError(f"{self.name}: nothing measures {sorted(unknown)}")

    def said(self, model: str | None) -> tuple[str, Table]:
        """Return the paper's model that a model is, or the first, and what the paper says of it."""
        return next((one for one in self.says.items() if one[0].lower() == _short(model)), next(iter(self.says.items())))

    def is_of(self, model: str | None) -> bool:
        """Return whether the paper has numbers of a model."""
        return _short(model) in map(str.lower, self.says)


def _short(model: str | None) -> str:
    return (model or "").rstrip("/").rpartition("/")[2].lower()


def experiments(paper: str, plans: Mapping[str, Measurement]) -> tuple[Experiment, ...]:
    """Return a paper's experiments: what it says, from papers/, and how each is measured."""
    found = []
    for name, one in tomllib.loads((_PAPERS / f"{paper}.toml").read_text(encoding="utf-8")).items():
        says = {model: table(text) for model, text in one.pop("says").items()}
        found.append(Experiment(name, says=says, plan=plans[name], **one))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The paper's numbers next to ours.

    differs: in what the run differs from the paper's, settings that it does not give aside.
    left_out: a sentence for each of the columns that could not be measured here.
    """

    experiment: Experiment
    model: str
    said: Table
    cells: Cells
    differs: str
    left_out: tuple[str, ...] = ()

    def lines(self) -> list[dict[str, Any]]:
        """Return a plain dict a row, for JSON."""
        about = {
            "name": self.experiment.name,
            "title": self.experiment.title,
            "source": self.experiment.source,
            "unit": self.experiment.unit,
            "paper_on": self.model,
        }
        return [
            {
                **about,
                "row": row,
                "paper": said,
                "ours": {column: cell.value for (name, column), cell in self.cells.items() if name == row},
                "ours_on": self.on(row),
                "differs": self.differs,
                "left_out": list(self.left_out),
            }
            for row, said in self.said.rows.items()
        ]

    def on(self, row: str) -> str:
        """Return what a row of ours was measured on."""
        each = list(dict.fromkeys(cell.on for (name, _), cell in self.cells.items() if name == row))
        words = each[0] if len(each) == 1 else f"{each[0]} ... {each[-1]}" if each else "not measured"
        return f"{self.differs}: {words}" if self.differs else words


def run(experiment: Experiment, lab: Lab) -> Outcome:
    """Measure an experiment, or read its cells from the lab's results."""
    check([experiment], lab)
    (model, said), before = experiment.said(lab.name), len(lab.left_out)
    with registered():
        measured = experiment.plan.measure(lab, list(said.rows))
    cells = {place: cell for place, cell in measured.items() if place[1] in said.columns}
    if not cells:
        why, *others = lab.left_out[before:] or [""]
        why += f" (and {len(others)} more)" * bool(others)
        raise ConfigError(f"nothing of it could be measured here; it needs {experiment.plan.needs}" + f"; {why}" * bool(why))
    if lab.quick and experiment.plan.needs != "nothing":
        cells = once(cells)
    return Outcome(experiment, model, said, cells, differs(experiment, lab), tuple(lab.left_out[before:]))


def check(wanted: Iterable[Experiment], lab: Lab) -> None:
    """Load the published data that experiments read, before any of them runs. Raises ConfigError that names all that is missing."""
    if lab.quick or lab.name is None:
        return
    missing: list[str] = []
    for name in dict.fromkeys(name for one in wanted for name in getattr(one.plan, "benchmarks", ())):
        try:
            lab.items(BENCHMARKS[name])
        except ConfigError as error:
            if lab.data is None:
                raise
            missing.append(f"{name}: {error}")
    if missing:
        raise ConfigError("; ".join(missing))


def once(cells: Cells) -> Cells:
    """Leave out cells that were measured with an earlier one: a quick run has one small measurement for many places of a table."""
    seen = dict[tuple[str, Value], tuple[str, str]]()
    return {place: cell for place, cell in cells.items() if seen.setdefault((cell.on, cell.value), place) == place}


def differs(experiment: Experiment, lab: Lab) -> str:
    """Return why numbers of ours cannot be compared with the paper's, "" where they can."""
    if lab.quick:
        return "NOT comparable, tiny"
    if not experiment.plan.needs.startswith("--model"):
        return "another machine than the paper's"
    return "" if experiment.is_of(lab.name) else "another model than the paper's"
