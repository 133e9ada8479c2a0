"""Choose which of a model's layers a cache offloads, and make the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.streams import Streams
from kvthaw.cache.window import WindowLayer, window_layers
from kvthaw.errors import ConfigError
from kvthaw.kernels.local import Span


def offloaded_numbers(settings: Settings, numbers: Sequence[int], depth: int) -> list[int]:
    """Return the numbers of the full-attention layers that the method serves. Raises ConfigError if there are none."""
    found = [] if settings.method.dense else [i for i in numbers if i >= settings.dense_layers]
    if not found and not settings.method.dense:
        raise ConfigError(
            f"dense_layers is {settings.dense_layers}; that leaves no layer to {settings.method.name}, of {depth}"
        )
    return found


def make_layers(
    settings: Settings, numbers: Sequence[int], depth: int, windows: Mapping[int, Span], sequences: Sequences, streams: Streams
) -> list[OffloadedLayer | DenseLayer | WindowLayer]:  # fmt: skip
    """Return the layers of a cache in order. An anchor leads the offloaded layers up to the next anchor. Arguments as for
    KVCache."""
    method, offloaded = settings.method, offloaded_numbers(settings, numbers, depth)
    local, leader = window_layers(windows, sequences), None
    layers: list[OffloadedLayer | DenseLayer | WindowLayer] = []
    for i in sorted((*numbers, *windows)):
        if i not in offloaded:
            layers.append(local[i] if i in local else DenseLayer(i, sequences, settings.method.prompt_queries))
            continue
        anchor = method.index is None or settings.selects(i, offloaded, depth)
        if not anchor and leader is None:
            raise ConfigError(f"anchors is {method.anchors}; layer {i} comes before the first and has nothing to follow")
        layer = OffloadedLayer(i, settings, streams, sequences, None if anchor else leader)
        leader = layer if anchor else leader
        layers.append(layer)
    return layers
