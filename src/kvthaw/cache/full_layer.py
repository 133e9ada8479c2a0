"""One layer whose queries attend to everything, with KV in blocks on the device: as much memory as there are tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.sparse_attention import SparseAttention
from kvthaw.cache.step import Step
from kvthaw.kernels.places import Newest


class FullLayer(OffloadedLayer):
    """Sink and ring in a slab, all other rows in blocks, of which attention reads each where it lies; see LayerKV.

    A DenseLayer has room for every sequence's capacity. This one takes blocks as tokens come, so that a running batch of short
    sequences with a large capacity may attend to everything. A block for which the device has no room lies on the host, and
    attention reads it over the bus.
    """

    def allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        plan, self.scale = replace(self.settings.plan(step.longest, self.sequences.limit), rows=0), scale
        self.storage = LayerStorage(len(step.left_pad), key, plan, self.settings, self.streams, self.preallocator)
        self.store, self.slab = self.storage.store, self.storage.slab
        self.storage.place_on_device(self.number)
        self.sparse = SparseAttention(self.storage, self.sequences, None, None, selects=False, everything=True)
        self.plan = plan
        self.sparse.make_room(self.sequences.capacity)
        self.streams.device.fixed[self.number] = self.fixed_bytes()

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        return self.sparse.attend(step, t, query, newest, attention)[0]
