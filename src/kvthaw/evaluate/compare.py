"""Every method on the same work: what is to be run, and what follows from the results, by paired differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvthaw.errors import ConfigError
from kvthaw.evaluate.cells import Cell
from kvthaw.evaluate.job import EVEN_DEPTHS, Job, Question, Unit
from kvthaw.evaluate.perplexity import Stretch
from kvthaw.evaluate.runner import Runner
from kvthaw.evaluate.variant import FULL, Variant, complete
from kvthaw.methods import METHODS, resolve

SUBJECTS = ("icecache", "pariskv", "clusterkv", "prkv")
"""The methods of the papers that kvthaw is about."""
BASELINES = tuple(name for name in METHODS if name not in (*SUBJECTS, "full", "oracle", "icecache-reuse", "icecache-device"))
"""What they are measured against: no bound (full, oracle), and none of their variants."""
WORKS = 0.6
"""Full attention is right at least so often where a comparison says something of a method and not of the model."""
KEEPS = 0.99
"""The share of full attention's accuracy that is to be kept."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every task at every length under every method, budget and protocol. questions: protocols, as for Job. dense_layers: first
    layers that keep all KV. The others are as for Job."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    lengths: tuple[int, ...]
    samples: int
    questions: tuple[Question, ...] = ("dense",)
    dense_layers: tuple[int, ...] = (0,)
    seed: int = 0
    probe: int = 0
    depths: tuple[float, ...] = EVEN_DEPTHS

    def jobs(self) -> list[Job]:
        """A job a task, length and protocol. Raises ConfigError for what no job can be."""
        return [
            Job(task, length, self.samples, self.seed, self.depths, question, self.probe)
            for task, length, question in itertools.product(self.tasks, self.lengths, self.questions)
        ]

    def variants(self) -> list[Variant]:
        """A variant a method, budget and number of dense layers; full attention once."""
        every = itertools.product(self.methods, self.budgets, self.dense_layers)
        found = (FULL if resolve(name).dense else Variant(name, budget, None, dense) for name, budget, dense in every)
        return list(dict.fromkeys((FULL, *found)))


def units(runner: Runner, grid: Grid, others: Sequence[Stretch] = ()) -> list[Unit | Stretch]:
    """What is missing of a grid. All cells get their first samples, as many as share their steps, before any gets its next, so that
    a run that is stopped has something of everything; what else is to be done comes in between. Each unit begins with full
    attention, with which all are compared, and goes on with another variant than the one before, so that workers do not all compile
    the same kernels at once.

    Raises ConfigError for a setting that no cache of the model would take.
    """
    wanted = [complete(runner.model, variant) for variant in grid.variants()]
    by_job = [runner.missing(job, wanted) for job in grid.jobs()]
    first, *rest = list(itertools.zip_longest(*by_job)) or [()]
    found = [*first, *others, *itertools.chain.from_iterable(rest)]
    return [_turned(unit, number) for number, unit in enumerate(unit for unit in found if unit is not None)]


def _turned(unit: Unit | Stretch, number: int) -> Unit | Stretch:
    first = unit.variants[:1] if unit.variants[0] == FULL else ()
    others = unit.variants[len(first) :]
    at = number * 5 % max(1, len(others))
    return replace(unit, variants=first + others[at:] + others[:at])


# What follows


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference of two methods over the samples that both were given: mean, and a 95 % interval around it.

    The interval is Agresti and Min's (2005): two pseudo-pairs are added, so that equal scores do not pass for certainty.
    """

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
        gaps = [a - b for a, b in pairs]
        n, total = len(gaps), sum(gaps)
        middle = total / (n + 2)
        spread = 1.959964 * math.sqrt(((sum(g * g for g in gaps) + 1) / (n + 2) - middle * middle) / (n + 2))
        means = (sum(side) / n for side in zip(*pairs, strict=True))
        return Paired(n, total / n, max(-1.0, middle - spread), min(1.0, middle + spread), *means)

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
    baseline there; icecache with `small` equals every baseline with `budget`."""
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


def check_one_model(cells: Sequence[Cell]) -> None:
    """Raise ConfigError where the cells are of several models, devices, versions or sources: those are not one comparison."""
    found = sorted({cell.about for cell in cells})
    if len(found) > 1:
        each = "; ".join(" ".join(filter(None, about)) for about in found)
        raise ConfigError(f"the results are of {len(found)} settings, and one report compares one: {each}. Use a folder each")
