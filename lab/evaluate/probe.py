"""Measure selections: means over the observations of a cache's sparse steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.hf import Cache
from kvthaw.errors import at_least
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.probe import Observation, Observer, observe, stored_rows
from kvthaw.evaluate.results import mean

_MEASURED = tuple(name for name in Observation.__dataclass_fields__ if name not in ("layer", "seq", "length"))


QUALITY = ("attention_mass", "recall_at_k", "output_error")
"""What records keep of a Quality."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over steps, layers and heads; None if the probe observed nothing.

    observed: steps times layers times sequences. The others are as in Observation.
    """

    attention_mass: float | None
    recall_at_k: float | None
    output_error: float | None
    observed: int
    rows: float | None = None
    recall_at_rows: float | None = None
    held_mass: float | None = None
    exact_mass: float | None = None
    ceiling: float | None = None
    ceiling_mass: float | None = None

    @staticmethod
    def of(observations: Sequence[Observation]) -> Quality:
        """Return the means of observations, each counting once."""
        means = {name: mean(float(getattr(o, name).nanmean()) for o in observations) for name in _MEASURED}
        return Quality(observed=len(observations), **means)

    @staticmethod
    def pooled(parts: Sequence[Quality]) -> Quality:
        """Return the means of all that the parts observed; a part counts by how much it observed."""
        found: dict[str, float | None] = {}
        for name in _MEASURED:
            known = [(part.observed, value) for part in parts if (value := getattr(part, name)) is not None]
            count = sum(n for n, _ in known)
            found[name] = sum(n * value for n, value in known) / count if count else None
        return Quality(observed=sum(part.observed for part in parts), **found)


class Probe(Observer):
    """Observes every sparse layer of a cache, at every n-th step of each.

    reference: a cache that holds the same first tokens in full; rows are read from it instead of the host store. Exact attention
    here knows neither softcap nor learned sinks. `seconds` is the time that observing took, to be taken off timings.
    """

    def __init__(self, cache: Cache, *, every: int = 1, reference: Cache | None = None) -> None:
        at_least(1, every=every)
        self.every = every
        self.observations: list[Observation] = []
        self.seconds = 0.0
        self._steps: dict[int, int] = {}
        self._reference = {} if reference is None else {layer.number: layer for layer in reference.kv.layers}
        super().__init__(cache.kv)

    def quality(self) -> Quality:
        """Means over all that was observed."""
        return Quality.of(self.observations)

    def row(self, seq: int, begin: int, end: int) -> Quality | None:
        """Return the means over the observations of a sequence between two lengths; None if there are no observations."""
        seen = [one for one in self.observations if one.seq == seq and begin < one.length <= end]
        return Quality.of(seen) if seen else None

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Observe a step of a layer, if it is the n-th."""
        step = self._steps.get(layer.number, 0)
        self._steps[layer.number] = step + 1
        if step % self.every:
            return
        start = now(query.device)
        for seq in range(layer.sequences.count):
            rows = stored_rows(layer, seq, query.device, self._reference.get(layer.number))
            self.observations.append(observe(layer, seq, query[seq], choice, rows))
        self.seconds += now(query.device) - start
