"""One layer whose queries attend to everything, with KV in blocks on the device: memory grows with the tokens."""

from __future__ import annotations

from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step
from kvthaw.kernels.places import Newest


class FullLayer(OffloadedLayer):
    """Sink and ring in a slab, all other rows in blocks, of which attention reads each where it lies; see LayerKV.

    A DenseLayer has room for every sequence's capacity. This one takes blocks as tokens come, so that a running batch of short
    sequences with a large capacity may attend to everything. A block for which the device has no room lies on the host, and
    attention reads it over the bus.
    """

    everything = True

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        return self.sparse.attend(step, t, query, newest, attention)[0]
