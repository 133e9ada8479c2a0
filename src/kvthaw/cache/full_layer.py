"""A layer that attends to everything, with KV in blocks on the device, so that memory grows with the tokens."""

from __future__ import annotations

from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step
from kvthaw.kernels.places import Newest


class FullLayer(OffloadedLayer):
    """Sink and ring in a slab, and all other rows in blocks, where attention reads them; see LayerKV.

    A DenseLayer reserves every sequence's capacity. A FullLayer allocates blocks as tokens come, so a running batch of
    short sequences with a large capacity may attend to everything. If the device is full, a block lies on the host and
    attention reads it over the bus.
    """

    everything = True

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        return self.sparse.attend(step, t, query, newest, attention)[0]
