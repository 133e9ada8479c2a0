"""Who holds blocks: what a test compares the owners with that blocks count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvthaw import PrefixCache
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.host_memory import Block
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import SequenceState
from kvthaw.cache.offloaded_layer import OffloadedLayer


def held(caches: Iterable[KVCache], prefix: PrefixCache | None = None, swapped: Iterable[SequenceState] = ()) -> Counter[Block]:
    """How often caches, a prefix cache and sequences that wait on the host hold each block."""
    found = Counter(block for kv in caches for block in _of(kv))
    if prefix is not None:
        found.update(block for blocks in prefix._kept.layers.values() for block in blocks.values())
    found.update(block for one in swapped for layer in one.layers for block in layer.blocks)
    return found


def _of(kv: KVCache) -> Iterator[Block]:
    for layer in {*kv.layers, *kv.chooser.by_method.values()}:
        if isinstance(layer, OffloadedLayer) and layer.plan is not None:
            stores = [layer.store]
        else:
            stores = [layer._offloaded] if isinstance(layer, DenseLayer) and layer._offloaded is not None else []
        for store in stores:
            for seq in range(store.seqs):
                yield from store.blocks(seq)


def check(found: Counter[Block]) -> None:
    """Fail where a block counts more or fewer owners than hold it."""
    counted, held = [block.owners for block in found], list(found.values())
    assert counted == held
