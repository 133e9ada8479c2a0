"""What a layer was before a step of several tokens, so that those of them that are not accepted can be taken back exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvthaw.cache.index_updater import Indexed
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.step import Step


@dataclass(eq=False)
class Checkpoint:
    """Sink and ring of a layer before a step, how far it was offloaded and indexed, its index; and what the step brings.

    From here on tokens are indexed in a copy, so that the index itself and its tensors stay where they are, for a captured step
    that reads them. tokens: query, key and value [B, heads, T, D]; queries: those that the index is asked with, None for the
    layer's own.
    """

    step: Step
    tokens: tuple[Tensor, Tensor, Tensor]
    attention: AttentionParams
    queries: Tensor | None
    storage: LayerStorage
    _held: Tensor = field(init=False)
    _offloaded: tuple[list[int], dict[int, tuple[int, int]]] = field(init=False)
    _indexed: Indexed | None = field(init=False)

    def __post_init__(self) -> None:
        updater = self.storage.updater
        self._held, self._offloaded = self.storage.slab.held().clone(), self.storage.offloader.marks()
        self._indexed = None if updater is None else updater.branch()

    def restore(self) -> None:
        """Have the layer be what it was."""
        offloader, updater = self.storage.offloader, self.storage.updater
        offloader.wait()
        if updater is not None and self._indexed is not None:
            updater.rejoin(self._indexed)
        offloader.rewind(self._offloaded)
        self.storage.slab.held().copy_(self._held)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied layer takes nothing back."""
