"""Allocate blocks for coming tokens ahead of time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from kvthaw.cache.host import HostStore
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.regions import Regions

_log = logging.getLogger(__name__)


class BlockPreallocator:
    """Allocate the next block of every sequence and layer ahead of time, round-robin.

    Pinning a block takes 1.5 ms, and sequences of one length need their next block in all layers at the same token.
    Therefore one or two (layer, sequence) pairs have their turn after each step. Every pair has its turn before its block
    is full.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._short = False  # of host memory
        self._done = 0  # decoded tokens up to which turns were given

    def turns(self, decoded: int, count: int, rounds: int) -> Iterator[tuple[int, int]]:
        """Yield (layer number, sequence) for the pairs whose turn has come since the last call, `count` sequences a layer."""
        pairs = self._streams.layers * count
        for step in range(max(self._done, decoded - rounds) + 1, decoded + 1) if decoded > self._done else ():
            for pair in range(step % rounds, pairs, rounds):
                yield divmod(pair, count)
        self._done = decoded

    def due(self, store: HostStore, regions: Regions, seq: int, length: int) -> bool:
        """Return whether a sequence of `length` tokens may need its next block before its next turn."""
        steps = store.reserved(seq) + regions.window + 1 - length  # a lower bound of the steps until it is needed
        return steps < self.rounds(store, regions)

    def expect(self, stores: Sequence[HostStore], seq: int, tokens: int) -> None:
        """Pin memory on a background thread for a sequence of `tokens` tokens and its next block in all `stores`.

        Chunks of its prompt, for which other sequences wait, then find pinned memory. With 0 tokens, nothing more is
        pinned.
        """
        needs = Counter[int]()
        for store in stores:
            blocks = -(-tokens // store.block_size) + 1 - store.reserved(seq) // store.block_size
            needs[store.allocator.size] += store.allocator.lacks(seq, blocks) if tokens and store.pinned else 0
        for size, count in needs.items():
            take = self._streams.memory.expect(count, size)
            if take is not None:
                self._streams.run_beside(take)

    def take(self, store: HostStore, seq: int) -> None:
        """Allocate the next block of a sequence."""
        try:
            store.allocator.preallocate(seq)
        except HostMemoryError as error:  # raised again when the sequence needs the block
            if not self._short:
                self._short = True
                _log.warning("host memory for coming tokens cannot be allocated ahead: %s", error)

    def rounds(self, store: HostStore, regions: Regions) -> int:
        """Return the steps within which every sequence of every layer has its turn."""
        return min(self._streams.layers * store.seqs, max(1, store.block_size // 2, store.block_size - regions.buffer))
