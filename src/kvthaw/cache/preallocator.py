"""Takes host memory for coming tokens before they come."""

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
    """Allocates the next host block of every sequence and layer ahead of time, round-robin.

    Pinning a block takes 1.5 ms, and sequences of one length need theirs in all layers at one token. So after each step one
    or two of all (layer, sequence) pairs have their turn, and each comes round before its block is full.
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
        steps = store.reserved(seq) + regions.window + 1 - length  # until it is needed, or some more
        return steps < self.rounds(store, regions)

    def expect(self, stores: Sequence[HostStore], seq: int, tokens: int) -> None:
        """Pin, on a thread beside the steps, what these stores will take until a sequence has so many tokens, and its next
        block: chunks of its prompt, which others' steps wait for, find it there. Without tokens, no more is taken."""
        needs = Counter[int]()
        for store in stores:
            blocks = -(-tokens // store.block_size) + 1 - store.reserved(seq) // store.block_size
            needs[store.allocator.size] += store.allocator.lacks(seq, blocks) if tokens and store.pinned else 0
        for size, count in needs.items():
            take = self._streams.memory.expect(count, size)
            if take is not None:
                self._streams.run_beside(take)

    def take(self, store: HostStore, seq: int) -> None:
        """Take the next block of a sequence."""
        try:
            store.allocator.preallocate(seq)
        except HostMemoryError as error:  # raised again where the sequence needs the block
            if not self._short:
                self._short = True
                _log.warning("host memory for coming tokens cannot be taken ahead: %s", error)

    def rounds(self, store: HostStore, regions: Regions) -> int:
        """Steps after which every sequence of every layer has had its turn."""
        return min(self._streams.layers * store.seqs, max(1, store.block_size // 2, store.block_size - regions.buffer))
