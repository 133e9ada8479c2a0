"""The tables and figures of the four papers, each under a name, with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Iterator

from kvthaw.errors import unknown
from lab.reproduce import clusterkv, icecache, pariskv, prkv
from lab.reproduce.experiment import Cell, Experiment, Outcome, check, run
from lab.reproduce.lab import Lab

PAPERS: dict[str, tuple[Experiment, ...]] = {
    "icecache": icecache.EXPERIMENTS,
    "pariskv": pariskv.EXPERIMENTS,
    "clusterkv": clusterkv.EXPERIMENTS,
    "prkv": prkv.EXPERIMENTS,
}
"""Paper -> its experiments."""
EXPERIMENTS: dict[str, Experiment] = {one.name: one for each in PAPERS.values() for one in each}
"""Name -> experiment."""


def named(names: str) -> Iterator[Experiment]:
    """Yield the experiments of names, of papers' names (all of theirs) and of "all", separated by commas. Raises ConfigError."""
    for name in dict.fromkeys(part.strip().lower() for part in names.split(",")):
        if name in EXPERIMENTS:
            yield EXPERIMENTS[name]
        elif name in PAPERS:
            yield from PAPERS[name]
        elif name == "all":
            yield from EXPERIMENTS.values()
        else:
            raise unknown("name", name, ("list", "all", *PAPERS, *EXPERIMENTS))


__all__ = ["EXPERIMENTS", "PAPERS", "Cell", "Experiment", "Lab", "Outcome", "check", "named", "run"]
