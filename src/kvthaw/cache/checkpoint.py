"""Checkpoints of layers before a step of several tokens, so that tokens that are not accepted are taken back exactly."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams, LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.passes import decode
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step


class Checkpoint:
    """Sink and ring of a layer before a step, its watermarks and its index; and what the step brings.

    From here on tokens are indexed in a copy, so that the index itself and its tensors stay where they are, for a captured step
    that reads them. tokens: query, key and value [B, heads, T, D].
    """

    def __init__(
        self, layer: OffloadedLayer, step: Step, tokens: tuple[Tensor, Tensor, Tensor], attention: AttentionParams
    ) -> None:
        self.layer, self.step, self._tokens, self._attention = layer, step, tokens, attention
        prefetched = None if layer.retriever is None else layer.retriever.prefetched
        self._queries = None if prefetched is None else prefetched.queries
        storage = layer.storage
        self._held, self._offloaded = storage.slab.held().clone(), storage.offloader.marks()
        self._indexed = None if storage.updater is None else storage.updater.branch()

    def restore(self) -> None:
        """Bring the layer back to what it was."""
        storage = self.layer.storage
        storage.offloader.wait()
        if storage.updater is not None and self._indexed is not None:
            storage.updater.rejoin(self._indexed)
        storage.offloader.rewind(self._offloaded)
        storage.slab.held().copy_(self._held)
        storage.slab.tickets.zero_()
        self.layer.drop_search()

    def repeat(self, step: Step) -> None:
        """Decode the first tokens again, as many as the new step has."""
        query, key, value = (tensor[:, :, : step.tokens] for tensor in self._tokens)
        if self.layer.retriever is not None and self._queries is not None:
            self.layer.retriever.prefetch(self._queries[:, :, : step.tokens], 0)
        decode(self.layer, step, query, key, value, self._attention)


class Checkpoints:
    """The checkpoints of a cache's layers, of the latest step of several tokens.

    A step that fails is taken back by them, and so are candidates of assisted decoding that a crop rejects.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._of: dict[int, Checkpoint] = {}
        self._verified: tuple[Step | None, int, int] = None, -1, -1  # the candidates' step; commits and version after it

    def save(
        self, layer: OffloadedLayer, step: Step, tokens: tuple[Tensor, Tensor, Tensor], attention: AttentionParams
    ) -> None:
        """Make a checkpoint of a layer before a step where crop() could not take back its last tokens exactly."""
        if self._irreversible(layer, step.tokens):
            self._of[layer.number] = Checkpoint(layer, step, tokens, attention)

    def _irreversible(self, layer: OffloadedLayer, tokens: int) -> bool:
        """Return whether tokens leave the ring before the last of `tokens`, or the index remembers their queries."""
        flushes, retriever = sum(self._sequences.full(t) for t in range(1, tokens)), layer.retriever
        if retriever is None:
            return flushes > 0
        return retriever.index.traits.remembers or flushes > int(retriever.index.reversible)

    def restore(self, step: Step) -> None:
        """Bring layers that have a checkpoint of a step back to what they were before it."""
        for checkpoint in self._of.values():
            if checkpoint.step is step:
                checkpoint.restore()

    def repeat(self, step: Step) -> None:
        """Decode the accepted first tokens of the step that was rolled back."""
        for checkpoint in self._of.values():
            checkpoint.repeat(step)

    def drop(self) -> None:
        """Keep the tokens of the latest step."""
        self._of.clear()
        self._verified = None, -1, -1

    def commit(self, step: Step) -> None:
        """Note that a step was committed, whose last tokens a crop may reject."""
        if self._sequences.verifying:
            self._verified = step, self._sequences.commits, self._sequences.version

    @property
    def candidates(self) -> Step | None:
        """The latest step, if its tokens are candidates and nothing has changed since."""
        step, *then = self._verified
        return step if then == [self._sequences.commits, self._sequences.version] else None

    def restorable(self, layers: Sequence[LayerKV]) -> Step | None:
        """Return the candidates' step if all these layers have a checkpoint of it."""
        step, found = self.candidates, [self._of.get(layer.number) for layer in layers]
        return step if found and all(each is not None and each.step is step for each in found) else None

    def __deepcopy__(self, memo: dict[int, object]) -> Checkpoints:
        """A copied cache takes nothing back by its checkpoints."""
        twin = Checkpoints(copy.deepcopy(self._sequences, memo))
        twin._verified = copy.deepcopy(self._verified, memo)
        return twin
