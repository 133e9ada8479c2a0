"""What this project set out to show, and what came of it: acceptance goals over the cells of a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cells import Cell
from kvthaw.evaluate.document import Share, Table, Value
from kvthaw.evaluate.metrics import paired, wilson
from kvthaw.methods import METHODS

SUBJECTS = ("icecache-digest", "pariskv-plus", "clusterkv-plus", "prkv")
"""The methods of the papers that kvthaw is about."""
OURS = ("icecache", "icecache-reuse", "icecache-digest-device", "clusterkv", "snapkv-refreshed", "pariskv", "prkv-plus")
BASELINES = tuple(name for name in METHODS if name not in (*SUBJECTS, *OURS, "full", "oracle"))
"""What they are measured against: no bound (full, oracle), none of their variants, and SnapKV once."""
WORKS = 0.6
"""Full attention is right at least so often where a comparison says something of a method and not of the model."""
KEEPS = 0.99
"""The share of full attention's accuracy that is to be kept."""


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference of two methods over the samples that both were given: mean, and a 95 % interval around it."""

    n: int
    difference: float
    low: float
    high: float
    mine: float
    theirs: float

    @staticmethod
    def of(mine: Iterable[Cell], theirs: Iterable[Cell]) -> Paired | None:
        """Over the cells of one task and length each; None where no sample is in both."""
        others = {(cell.task, cell.length, cell.question): cell for cell in theirs}
        pairs = [
            (score, other.scores[place])
            for cell in mine
            if (other := others.get((cell.task, cell.length, cell.question))) is not None
            for place, score in cell.scores.items()
            if place in other.scores
        ]
        if not pairs:
            return None
        means = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        return Paired(len(pairs), *paired([a - b for a, b in pairs]), *means)

    @property
    def text(self) -> str:
        """In points."""
        return f"{100 * self.difference:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f}) points, n={self.n}"


@dataclass(frozen=True, slots=True)
class Goal:
    """What was hoped for of a method beside another, and what came of it. met: None where it was not measured. hope: what it is a
    part of."""

    text: str
    hope: str
    other: str
    met: bool | None
    paired: Paired | None


@dataclass(frozen=True, slots=True)
class Hope:
    """Goals that belong together: how many are met, missed by less than the interval shows, measured, and there; and the one that
    is missed by most or met by least."""

    text: str
    met: int
    unclear: int
    measured: int
    of: int
    tightest: Goal | None

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.measured:
            return "not measured"
        missing = f", {self.of - self.measured} not measured" if self.measured < self.of else ""
        unclear = f", {self.unclear} more within the interval" if self.unclear else ""
        counts = f" ({self.met} of {self.measured}{unclear})" if self.of > 1 else ""
        return ("met" if self.met == self.measured else "not met") + counts + missing


def hopes(of: Sequence[Goal]) -> list[Hope]:
    """Goals by what they are a part of, in their order."""
    groups: dict[str, list[Goal]] = {}
    for goal in of:
        groups.setdefault(goal.hope, []).append(goal)
    found = []
    for text, some in groups.items():
        measured = [(goal.paired.difference, goal) for goal in some if goal.paired is not None]
        tightest = min(measured, key=lambda pair: pair[0])[1] if measured else None
        met = sum(goal.met is True for goal in some)
        unclear = sum(goal.met is False and goal.paired is not None and goal.paired.high >= 0 for goal in some)
        found.append(Hope(text, met, unclear, len(measured), len(some), tightest))
    return found


Protocol = tuple[str, int]
"""How the question was processed, and how many layers are dense."""


def protocols(cells: Sequence[Cell]) -> list[Protocol]:
    """Those that methods were measured under."""
    return sorted({(cell.question, cell.dense_layers) for cell in cells if not cell.full})


def under(cells: Sequence[Cell], protocol: Protocol) -> list[Cell]:
    """The cells of a protocol, full attention's among them whatever its layers."""
    question, dense = protocol
    return [cell for cell in cells if cell.question == question and (cell.full or cell.dense_layers == dense)]


def work(cells: Sequence[Cell]) -> set[tuple[str, int]]:
    """Task and length of the cells where full attention is right often enough."""
    return {(cell.task, cell.length) for cell in cells if cell.full and cell.accuracy >= WORKS}


def whole(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the tasks and lengths that were run at every budget."""
    budgets: dict[tuple[str, int], set[int | float]] = {}
    for cell in cells:
        if cell.budget is not None:
            budgets.setdefault((cell.task, cell.length), set()).add(cell.budget)
    every = set().union(*budgets.values())
    return [cell for cell in cells if budgets.get((cell.task, cell.length)) == every]


def chosen(cells: Sequence[Cell], method: str, budget: int | float | None) -> list[Cell]:
    """The cells of a method at a budget where full attention is right often enough; budget None: full attention's own."""
    where = work(cells)
    return [
        c for c in cells if c.method == method and c.budget == budget and c.retrieved is None and (c.task, c.length) in where
    ]


def goals(cells: Sequence[Cell], budget: int = 256, small: int = 64) -> list[Goal]:
    """The goals under one protocol, every one of them: each subject keeps 99 % of full attention with `budget`, and equals every
    baseline there; icecache-digest with `small` equals every baseline with `budget`."""
    full = chosen(cells, "full", None)
    found = []
    for name in SUBJECTS:
        text = f"{name} at {budget} keeps {100 * KEEPS:.0f} % of full"
        found.append(_goal((text, text, "full"), chosen(cells, name, budget), full, _kept))
    matches = [(name, budget) for name in SUBJECTS] + [(SUBJECTS[0], small)]
    for (name, mine), baseline in itertools.product(matches, BASELINES):
        text, hope = (f"{name} at {mine} equals {what} at {budget}" for what in (baseline, "every baseline"))
        found.append(_goal((text, hope, baseline), chosen(cells, name, mine), chosen(cells, baseline, budget), _equals))
    return found


def _goal(names: tuple[str, str, str], mine: list[Cell], theirs: list[Cell], holds: Callable[[Paired], bool]) -> Goal:
    paired = Paired.of(mine, theirs)
    return Goal(*names, None if paired is None else holds(paired), paired)


def _kept(paired: Paired) -> bool:
    return paired.mine >= KEEPS * paired.theirs


def _equals(paired: Paired) -> bool:
    return paired.difference >= 0


def named(protocol: Protocol) -> str:
    """A protocol in words."""
    question, dense = protocol
    how = "the question in the prefill" if question == "dense" else "the question through the method"
    return f"{how}, " + (f"{dense} dense layers" if dense else "every layer under the method")


def verdicts(of: Sequence[Goal]) -> Table:
    """What came of the goals: a row for those that belong together, and the one of them with the least difference."""
    rows: list[list[Value]] = []
    for hope in hopes(of):
        least = hope.tightest
        rows.append([hope.text, hope.verdict, *(["-"] * 4 if least is None else [least.other, *_paired(least.paired)])])
    return Table(("goal", "verdict", "the nearest", "difference", "its accuracy", "the other's"), rows)


def _paired(paired: Paired | None) -> list[Value]:
    if paired is None:
        return ["-", "-", "-"]
    gap = Share(paired.difference, paired.low, paired.high, paired.n, signed=True)
    return [gap, f"{100 * paired.mine:.1f}", f"{100 * paired.theirs:.1f}"]


def by_budget(cells: Sequence[Cell]) -> Table:
    """Mean accuracy over the work that full attention can do and that was run at every budget, and the samples that all have: a row
    a method, the best first, a column a budget."""
    cells = _alike(whole(cells))
    budgets = sorted({c.budget for c in cells if c.budget is not None})
    names = list(dict.fromkeys(c.method for c in cells if not c.full and c.budget is not None))
    found = {name: [chosen(cells, name, budget) for budget in budgets] for name in names}

    def right(name: str) -> float:
        every = [cell for some in found[name] for cell in some]
        return sum(sum(c.scores.values()) for c in every) / max(1, sum(c.n for c in every))

    rows = [["full", *[_share(chosen(cells, "full", None))] * len(budgets)]]
    rows += [[name, *map(_share, found[name])] for name in sorted(names, key=right, reverse=True)]
    return Table(("method", *(f"{budget} tokens" for budget in budgets)), rows)


def _alike(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with the samples that all of the same task and length have."""
    shared: dict[tuple[str, int], set[tuple[int, float | None]]] = {}
    for cell in cells:
        shared.setdefault((cell.task, cell.length), set(cell.scores)).intersection_update(cell.scores)
    own = ((cell, shared[cell.task, cell.length]) for cell in cells)
    return [replace(c, scores={place: score for place, score in c.scores.items() if place in of}) for c, of in own if of]


def _share(cells: Sequence[Cell]) -> Value:
    scores = [score for cell in cells for score in cell.scores.values()]
    if not scores:
        return "-"
    mean = sum(scores) / len(scores)
    return Share(mean, *wilson(mean, len(scores)), len(scores))
