"""Which of a model's layers a cache offloads, and the layers themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from kvthaw.cache.addresses import write
from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host_memory import held_bytes
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.preallocator import BlockPreallocator
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.streams import Streams
from kvthaw.cache.window import WindowLayer, window_layers
from kvthaw.errors import ConfigError
from kvthaw.kernels.local import Span

BUILT_AT_ONCE = 4
"""Layers whose indexes of a joining prompt are built between two steps of other sequences."""


def offloaded_numbers(settings: Settings, numbers: Sequence[int], depth: int) -> list[int]:
    """Return the layers, of those that attend to everything, that the method serves. Raises ConfigError if it is left with none."""
    found = [] if settings.method.dense else [i for i in numbers if i >= settings.dense_layers]
    if not found and not settings.method.dense:
        raise ConfigError(
            f"dense_layers is {settings.dense_layers}; that leaves no layer to {settings.method.name}, of {depth}"
        )
    return found


def make_layers(
    settings: Settings, numbers: Sequence[int], depth: int, windows: Mapping[int, Span], sequences: Sequences, streams: Streams,
    preallocator: BlockPreallocator,
) -> list[OffloadedLayer | DenseLayer | WindowLayer]:  # fmt: skip
    """Return the layers of a cache in order; arguments as of KVCache. An anchor leads the offloaded layers up to the next one."""
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
        layer = OffloadedLayer(i, settings, streams, sequences, preallocator, None if anchor else leader)
        leader = layer if anchor else leader
        layers.append(layer)
    return layers


def check_memory(layers: Sequence[object], streams: Streams, blocks: int, size: int, device: torch.device) -> None:
    """Raise HostMemoryError where so many more blocks of a size in every layer fit neither the device nor the host."""
    streams.device.resolve(device)
    streams.memory.check(lambda: _host_need(layers, streams, blocks, size, pinned=device.type == "cuda"))


def _host_need(layers: Sequence[object], streams: Streams, blocks: int, size: int, *, pinned: bool) -> int:
    """Return the bytes of host memory that the blocks take beside those that the device has room for."""
    share, total = streams.device.share, 0
    for layer in layers:
        if isinstance(layer, OffloadedLayer) and layer.plan is not None:
            total += layer.storage.host_need(blocks)
        elif isinstance(layer, OffloadedLayer):
            total += max(0, blocks - max(0, share(layer.number)) // size) * held_bytes(size, pinned=pinned)
    return total


def indexed_layers(layers: Sequence[object]) -> list[tuple[OffloadedLayer, IndexUpdater]]:
    """Return the layers that have an index of their own, and its updater."""
    offloaded = [layer for layer in layers if isinstance(layer, OffloadedLayer) and layer.plan is not None]
    return [(layer, layer.storage.updater) for layer in offloaded if layer.storage.updater is not None]


def expect(layers: Sequence[object], seq: int, tokens: int) -> None:
    """See BlockPreallocator.expect; the layers are those whose rows are kept."""
    some = [layer.storage for layer in layers if isinstance(layer, OffloadedLayer) and layer.plan is not None]
    stores = [storage.store for storage in some if storage.offloader.keeps]
    for storage in some[:1]:
        storage.preallocator.expect(stores, seq, tokens)


def wait_indexed(layers: Sequence[object]) -> None:
    """Wait until indexes have been given all tokens, and raise what went wrong. Copies to the host may be under way."""
    for _, updater in indexed_layers(layers):
        updater.retriever.wait()


def note_lost(layers: Sequence[object], lost: set[int]) -> None:
    """Have sequences be indexed again whose queued work was dropped; see DeferredBatch."""
    for _, updater in indexed_layers(layers) if lost else ():
        for seq in lost:
            updater.begin_again(seq)
    lost.clear()


def follow_blocks(layers: Sequence[object]) -> None:
    """Bring the addresses of all layers' new blocks to the device by one copy: each would wait for KV that is on its way there."""
    some = [layer.sparse for layer in layers if isinstance(layer, OffloadedLayer) and layer.plan is not None]
    own = [(one, one.storage.store) for one in some if one.reads_table]
    if own:
        device = own[0][0].storage.slab.data.device
        write((store.on_device.changes(store, device) for _, store in own), device)
    for one, _ in own:
        one.follow_blocks()


def drop(cleared: deque[tuple[LayerKV, int]], most: int | None) -> bool:
    """Have layers drop the sequences queued, at most so many. Returns whether there were any and none is left."""
    for _ in range(count := len(cleared) if most is None else min(most, len(cleared))):
        layer, seq = cleared.popleft()
        layer.clear(seq)
    return bool(count and not cleared)


def reserve(layers: Sequence[LayerKV], sequences: Sequences, tokens: int) -> None:
    """Allocate the host blocks for the tokens that leave their rings during the next `tokens` tokens, if these are decoded one by
    one. Raises HostMemoryError before anything has changed."""
    if sequences.regions is None or sequences.filling is not None or not sequences.decodes(tokens):
        return
    if tokens == 1 and not sequences.full():
        return
    after = {seq: sequences.length(seq) + tokens for seq in range(sequences.count) if seq not in sequences.idle}
    ends = {seq: end for seq, n in after.items() if (end := sequences.indexed(seq, n)) > sequences.indexed(seq)}
    for layer in layers if ends else ():
        layer.reserve_blocks(ends)


@torch.inference_mode(False)  # tensors made here outlive the caller's mode
@torch.no_grad()
def built(layers: Sequence[object], seq: int, timeout: float | None, *, build: bool = True) -> bool:
    """See KVCache.built. Indexes on the device are built here: with timeout 0, where other sequences wait, of few layers a call."""
    most = (len(layers) if timeout is None or timeout > 0 else BUILT_AT_ONCE) if build else 0
    left = [(layer, own) for layer, own in indexed_layers(layers) if seq in own.stale and not own.retriever.index.on_host]
    for layer, updater in left[:most]:
        updater.renew({seq: layer.sequences.indexed(seq)}, layer.recent_queries)
    return len(left) <= most and all(updater.built(seq, timeout) for _, updater in indexed_layers(layers))
