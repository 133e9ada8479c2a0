"""What the papers and this project claim of accuracy, and what came of it over the cells of a comparison.

usage: python3 -m lab.claims OUT...    OUT: a folder of python -m lab compare. Prints the claims that each says something of,
and accuracy by task at 256 tokens; the tables of docs/notes/shipped-model.md are written by lab/compared.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvthaw.methods import METHODS
from lab.cells import Cell, read_cells
from lab.evaluate.document import Share, Table, Value
from lab.evaluate.metrics import paired, wilson

OURS = ("icecache-digest", "pariskv-plus", "clusterkv-plus", "prkv-plus")
"""kvthaw's own methods, which the project's claims are about."""
_NOT = ("icecache", "pariskv", "clusterkv", "prkv", "thaw", "full", "oracle", "auto", "snapkv-refreshed")
BASELINES = tuple(name for name in METHODS if not name.startswith(_NOT))
"""What ours are measured against: the papers' own baselines, SnapKV once."""
EXACT = ("longeval", "kv_retrieval", "niah_multikey_uuid")
"""Tasks that ask for one exact string among many of its kind. None of the four papers has them."""
WORKS = 0.6
"""Full attention is right at least so often where a comparison says something of a method and not of the model."""
MARGIN = 0.01
"""So much worse still counts as equal: one point."""


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
    def of(mine: Iterable[Cell], theirs: Iterable[Cell], share: float = 1.0) -> Paired | None:
        """Over the cells of one task and length each; None where no sample is in both. share: of the others' scores."""
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
        return Paired(len(pairs), *paired([a - share * b for a, b in pairs]), *means)


@dataclass(frozen=True, slots=True)
class Asked:
    """A method as it was asked for."""

    method: str
    budget: int | float | None = None
    retrieved: int | None = None

    def __str__(self) -> str:
        limit = f" at {self.budget}" if self.budget else f", {self.retrieved} retrieved" if self.retrieved else ""
        return self.method + limit


FULL = Asked("full")


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody says of a method: it keeps `share` of each other's accuracy, less `margin`.

    tasks: these only, every one if empty.
    """

    by: str
    mine: Asked
    others: tuple[Asked, ...] = (FULL,)
    share: float = 1.0
    margin: float = 0.0
    tasks: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = (
            f"equals every baseline at {self.others[0].budget}"
            if len(self.others) > 1
            else f"keeps {100 * self.share:g} % of full"
        )
        return f"{self.mine} {what}" + (f" ({', '.join(self.tasks)})" if self.tasks else "")


CLAIMS = (
    Claim("IceCache, abstract", Asked("icecache", 256), share=0.99),
    Claim("IceCache, figure 6", Asked("icecache", 64), margin=MARGIN, tasks=("passkey",)),
    Claim("ParisKV, tables 3 and 6", Asked("pariskv", retrieved=100), share=0.99),
    Claim("ClusterKV, table I", Asked("clusterkv", retrieved=256), share=0.953),
    Claim("ClusterKV, table I", Asked("clusterkv", retrieved=1024), share=0.986),
    Claim("table I, regions within the budget", Asked("clusterkv", 256), share=0.953),
    Claim("table I, regions within the budget", Asked("clusterkv", 1024), share=0.986),
    Claim("PRKV, figure 6", Asked("prkv", retrieved=256), margin=MARGIN, tasks=("niah_single",)),
    *(Claim("kvthaw", Asked(name, 256), share=0.99) for name in OURS),
    *(
        Claim("kvthaw", Asked(name, mine), tuple(Asked(other, 256) for other in BASELINES), margin=MARGIN)
        for name, mine in [*((name, 256) for name in OURS), (OURS[0], 64)]
    ),
)
"""The papers' numbers are of other tasks and models; what they say a method keeps is asked of these tasks and this model."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim beside one of the others: met where the interval lies above, not met where it lies below, else undecided."""

    claim: Claim
    other: Asked
    paired: Paired

    @property
    def verdict(self) -> str:
        """In a word."""
        least = -self.claim.margin
        return "met" if self.paired.low >= least else "not met" if self.paired.high < least else "undecided"


def judge(cells: Sequence[Cell], claim: Claim) -> list[Judged]:
    """Return the claim beside each of its others that shares samples with it."""
    some = [cell for cell in cells if not claim.tasks or cell.task in claim.tasks]
    mine = chosen(some, claim.mine)
    pairs = ((other, Paired.of(mine, chosen(some, other), claim.share)) for other in claim.others)
    return [Judged(claim, other, paired) for other, paired in pairs if paired is not None]


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


def complete(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the tasks and lengths that were run under every method and budget, with the seeds that all of them have, so that
    every task and length counts alike."""
    found: dict[tuple[str, int], set[tuple[str, int | float]]] = {}
    for cell in cells:
        if cell.budget is not None:
            found.setdefault((cell.task, cell.length), set()).add((cell.method, cell.budget))
    every = set().union(*found.values())
    some = _alike([cell for cell in cells if found.get((cell.task, cell.length)) == every])
    seeds = set.intersection(*({seed for seed, _ in cell.scores} for cell in some))
    return [replace(cell, scores={place: score for place, score in cell.scores.items() if place[0] in seeds}) for cell in some]


def chosen(cells: Sequence[Cell], asked: Asked) -> list[Cell]:
    """The cells of a method where full attention is right often enough."""
    where, limit = work(cells), (asked.method, asked.budget, asked.retrieved)
    return [c for c in cells if (c.method, c.budget, c.retrieved) == limit and (c.task, c.length) in where]


def verdicts(cells: Sequence[Cell], claims: Iterable[Claim] = CLAIMS) -> Table:
    """A row a claim: what came of it, and the difference to the other that is nearest to breaking it."""
    rows: list[list[Value]] = []
    for claim in claims:
        found = judge(cells, claim)
        if not found:
            rows.append([str(claim), claim.by, "not measured", "-", "-", "-", "-"])
            continue
        counts = Counter(one.verdict for one in found)
        verdict = ", ".join(
            f"{word} {counts[word]} of {len(claim.others)}" for word in ("met", "undecided", "not met") if counts[word]
        )
        missing = len(claim.others) - len(found)
        least = min(found, key=lambda one: one.paired.difference)
        gap = Share(least.paired.difference, least.paired.low, least.paired.high, least.paired.n, signed=True)
        text = (found[0].verdict if len(claim.others) == 1 else verdict) + (f", {missing} not measured" if missing else "")
        rows.append(
            [
                str(claim),
                claim.by,
                text,
                str(least.other),
                gap,
                f"{100 * least.paired.mine:.1f}",
                f"{100 * least.paired.theirs:.1f}",
            ]
        )
    return Table(
        ("claim", "made by", "here", "the nearest", "difference to what it must keep", "its accuracy", "the other's"), rows
    )


def by_budget(cells: Sequence[Cell]) -> Table:
    """Mean accuracy over the work that full attention can do and that was run at every budget, and the samples that all have: a row
    a method, the best first, a column a budget."""
    cells = _alike(whole([cell for cell in cells if cell.retrieved is None and not isinstance(cell.budget, float)]))
    budgets = sorted({c.budget for c in cells if c.budget is not None})
    names = list(dict.fromkeys(c.method for c in cells if not c.full))
    found = {name: [chosen(cells, Asked(name, budget)) for budget in budgets] for name in names}

    def right(name: str) -> tuple[int, float]:
        every = [cell for some in found[name] for cell in some]
        return sum(bool(some) for some in found[name]), sum(sum(c.scores.values()) for c in every) / max(
            1, sum(c.n for c in every)
        )

    rows = [["full", *[_share(chosen(cells, FULL))] * len(budgets)]]
    rows += [[name, *map(_share, found[name])] for name in sorted(names, key=right, reverse=True)]
    return Table(("method", *(f"{budget} tokens" for budget in budgets)), rows)


def by_task(cells: Sequence[Cell], budget: int) -> Table:
    """Accuracy at a budget, or with the rows or the share of the context that a method was asked for: a row a method, the best
    first; a column a task, exact strings last, in percent at each length; and how many tokens a step attends to."""
    some = [cell for cell in cells if cell.budget in (budget, None) or isinstance(cell.budget, float)]
    tasks = sorted({cell.task for cell in some}, key=lambda task: (task in EXACT, task))
    lengths = sorted({cell.length for cell in some})
    found: dict[str, list[Cell]] = {}
    for cell in some:
        share = cell.budget if isinstance(cell.budget, float) else None
        found.setdefault(str(Asked(cell.method, share, cell.retrieved)), []).append(cell)

    def row(name: str) -> list[Value]:
        right = {(cell.task, cell.length): f"{100 * cell.accuracy:.0f}" for cell in found[name]}
        read = [cell.means["attended_mean"] for cell in found[name]]
        attended = "all" if None in read else f"{sum(filter(None, read)) / len(read):.0f}"
        return [name, *(" / ".join(right.get((task, length), "-") for length in lengths) for task in tasks), attended]

    names = sorted(found, key=lambda name: (name != "full", -sum(cell.accuracy for cell in found[name])))
    return Table(("method", *tasks, "attended"), [row(name) for name in names])


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


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    for path in map(Path, arguments):
        cells = read_cells(path)
        judged = verdicts(cells, [claim for claim in CLAIMS if judge(cells, claim)])
        print(
            f"{path}, {', '.join(sorted({cell.about[3] for cell in cells}))}",
            judged.markdown(),
            by_task(cells, 256).markdown(),
            sep="\n\n",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
