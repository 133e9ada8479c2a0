"""Measure variants side by side: only samples without results, and together the samples that share their steps."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvthaw.engine.hf import PreTrainedModel
from kvthaw.evaluate.machine import identity
from kvthaw.evaluate.prefills import Prefills, Rows, Tell, spread
from kvthaw.evaluate.results import Record, ResultsFile, Setting
from kvthaw.evaluate.variant import FULL, Variant, complete

Work = TypeVar("Work")
Place = TypeVar("Place")
"""The key of a sample within one piece of work."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: samples done of all, and tokens prefilled of the sample at hand."""

    samples: int
    of: int
    tokens: int
    prompt: int
    doing: str


Watch = Callable[[Progress], None]
"""Called with the progress of a run."""


@dataclass(frozen=True, slots=True)
class Piece(Generic[Work, Place]):
    """Samples that run in one batch, and the results to compute for each."""

    work: Work
    places: tuple[Place, ...]
    variants: tuple[Variant, ...]


class Evaluator(ABC, Generic[Work, Place]):
    """A model, and the results it has given so far.

    batch: samples that share their decoding steps, as rows of one cache; see Rows. Each sample is prefilled alone, and a
        row's line is that of the row alone.
    prefills: how prompts are prefilled; None: with full attention, see Prefills.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        results: ResultsFile | None = None,
        *,
        name: str = "model",
        batch: int | None = 1,
        prefills: Prefills | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.results = ResultsFile() if results is None else results
        self.same = identity(model, name)
        self.sharing, self.prefills = Rows(model, batch), prefills or Prefills(model)

    @abstractmethod
    def check(self, work: Work) -> None:
        """Raise ConfigError for work that the model cannot do."""

    @abstractmethod
    def places(self, work: Work) -> Sequence[Place]:
        """Return the keys of the samples of a piece of work."""

    @abstractmethod
    def settings(self, work: Work, variant: Variant, places: Sequence[Place]) -> list[list[Setting]]:
        """Return the settings that the records of each sample under a complete variant depend on."""

    @abstractmethod
    def rows(self, work: Work) -> int:
        """Return how many samples share their steps."""

    @abstractmethod
    def compute(self, piece: Piece[Work, Place], tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        """Yield the records of a piece of work, all records of a variant at once.

        tell: the method calls tell(tokens, of, doing) during a prefill and before every variant.
        """

    def run(
        self,
        work: Work,
        variants: Sequence[Variant],
        progress: Watch = lambda _: None,
        *,
        places: Sequence[Place] | None = None,
    ) -> dict[Variant, list[Record]]:
        """Return the records of every variant, and of FULL, in the order of the samples. Compute only records that the results
        lack.

        places: of some samples; None: of all.

        Raises ConfigError, before anything is computed, for a setting that no cache would take.
        """
        asked = dict.fromkeys((*variants, FULL) if self.prefills.full else variants)
        wanted = {one: complete(self.model, one) for one in asked}
        mine = self.places(work) if places is None else places
        pieces = self.missing(work, list(dict.fromkeys(wanted.values())), mine)
        done = len(mine) - sum(len(piece.places) for piece in pieces)
        for piece in pieces:

            def tell(tokens: int, total: int, doing: str, done: int = done) -> None:
                progress(Progress(done, len(mine), tokens, total, doing))

            for records in self.compute(piece, tell):
                self.results.add(*records)
            done += len(piece.places)
        progress(Progress(len(mine), len(mine), 0, 0, "done"))
        asked_for = {one: itertools.chain.from_iterable(self.settings(work, of, mine)) for one, of in wanted.items()}
        known = {one: map(self.results.get, of) for one, of in asked_for.items()}
        return {one: [record for record in of if record is not None] for one, of in known.items()}

    def missing(self, work: Work, wanted: Sequence[Variant], places: Sequence[Place] | None = None) -> list[Piece[Work, Place]]:
        """Return the pieces of a work, or of some of its samples, that have no results under complete variants.

        A piece holds samples that lack the same variants and share their steps. Raises ConfigError for work that the model
        cannot do.
        """
        self.check(work)
        places = self.places(work) if places is None else places
        settings = {variant: self.settings(work, variant, places) for variant in wanted}
        lacking: dict[tuple[Variant, ...], list[Place]] = {}
        for i, place in enumerate(places):
            lack = tuple(each for each, of in settings.items() if any(self.results.get(one) is None for one in of[i]))
            if lack:
                lacking.setdefault(lack, []).append(place)
        return [Piece(work, block, lack) for lack, some in lacking.items() for block in self.blocks(work, some, lack)]

    def blocks(self, work: Work, places: Sequence[Place], variants: Sequence[Variant] = ()) -> list[tuple[Place, ...]]:
        """Return samples in blocks that share their steps under some variants."""
        return [tuple(places[a:b]) for a, b in spread(len(places), self.rows(work))]
