"""Checkpoints before a step of several tokens: the state of layers, which a step that fails or a crop goes back to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams, LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.passes import decode
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step


class Checkpoint:
    """State of a layer before a step: sink, ring, watermarks and index; and the step's own tokens.

    Until restore(), tokens are indexed in a copy. The index and its tensors keep their addresses, because a captured step
    reads them.

    tokens: query, key and value of the step, [B, heads, T, D] each.
    """

    def __init__(
        self, layer: OffloadedLayer, step: Step, tokens: tuple[Tensor, Tensor, Tensor], attention: AttentionParams
    ) -> None:
        self.layer, self.step, self._tokens, self._attention = layer, step, tokens, attention
        self._predicted = None if layer.own is None else layer.own.predicted
        storage = layer.storage
        self._held, self._offloaded = storage.slab.held().clone(), storage.marks()
        self._rejoin = None if layer.updater is None else layer.updater.branch()

    def restore(self) -> None:
        """Restore the layer to its state before the step."""
        storage = self.layer.storage
        storage.store.wait()
        if self._rejoin is not None:
            self._rejoin()
        storage.rewind(self._offloaded)
        storage.slab.held().copy_(self._held)
        storage.slab.tickets.zero_()
        self.layer.drop_search()

    def repeat(self, step: Step) -> None:
        """Decode the first `step.tokens` tokens of the rolled-back step again."""
        query, key, value = (tensor[:, :, : step.tokens] for tensor in self._tokens)
        if self.layer.own is not None and self._predicted is not None:
            self.layer.own.predict(self._predicted[:, :, : step.tokens], 0)
        decode(self.layer, step, query, key, value, self._attention)


class Checkpoints:
    """Checkpoints before a step of several tokens, which roll it back if it fails or crop() rejects its candidates."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._of: dict[int, Checkpoint] = {}
        self._verified: tuple[Step | None, int, int] = None, -1, -1  # the candidates' step; commits and version after it

    def save(
        self, layer: OffloadedLayer, step: Step, tokens: tuple[Tensor, Tensor, Tensor], attention: AttentionParams
    ) -> None:
        """Save a layer's state before a step if crop() could not roll back its last tokens exactly."""
        index = None if layer.retriever is None else layer.retriever.index
        flushes = sum(self._sequences.full(t) for t in range(1, step.tokens))  # before its last token
        undone = 0 if index is None or not index.reversible else 1
        if flushes > undone or (index is not None and index.traits.remembers):
            self._of[layer.number] = Checkpoint(layer, step, tokens, attention)

    def restore(self, step: Step) -> None:
        """Restore the layers that have a checkpoint of `step`."""
        for checkpoint in self._of.values():
            if checkpoint.step is step:
                checkpoint.restore()

    def repeat(self, step: Step) -> None:
        """Decode the accepted first tokens of the step that was rolled back."""
        for checkpoint in self._of.values():
            checkpoint.repeat(step)

    def drop(self) -> None:
        """Discard the checkpoints: the tokens of the latest step stay."""
        self._of.clear()
        self._verified = None, -1, -1

    def commit(self, step: Step) -> None:
        """Record a committed step whose last tokens crop() may reject."""
        if self._sequences.verifying:
            self._verified = step, self._sequences.commits, self._sequences.version

    @property
    def candidates(self) -> Step | None:
        """The latest step, if its tokens are unverified candidates and nothing has changed since; else None."""
        step, *then = self._verified
        return step if then == [self._sequences.commits, self._sequences.version] else None

    def restorable(self, layers: Sequence[LayerKV]) -> Step | None:
        """Return the candidates' step if all of `layers` have a checkpoint of it."""
        step, found = self.candidates, [self._of.get(layer.number) for layer in layers]
        return step if found and all(each is not None and each.step is step for each in found) else None
