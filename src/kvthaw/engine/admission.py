"""Admission control: does a running batch have the memory for another request, until its last token?"""

from __future__ import annotations

from collections.abc import Sequence

from kvthaw.cache.host_memory import held_bytes
from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.hf.batch_cache import BatchCache
from kvthaw.engine.request import Request


class Admission:
    """Compare the memory that requests may take until their last tokens with host and device memory, in whole blocks.

    Only blocks of KV count, wherever they lie. Everything else is allocated for the whole batch when the first request
    joins. The limits are host_bytes, or the system's free memory, and the part of device_memory that is left to blocks.
    Under method="auto" requests also count while full attention is in force, unless they cannot outgrow it. Requests that
    cannot outgrow it wait for room in its blocks, if it holds KV in blocks: it is faster than the method until then.

    Three things are not predicted: a device with less memory than device_memory, an index that outgrows its tables, and
    entries that are named meanwhile.
    """

    def __init__(self, cache: BatchCache, prefix_cache: PrefixCache | None) -> None:
        self.kv, self.prefix_cache = cache.kv, prefix_cache
        self._on_device, self._pinned = cache.blocks_stay is None, cache.model.device.type == "cuda"

    def need(self, request: Request) -> int:
        """Return the most bytes of host memory that a request's KV may take; 0 if unknown yet."""
        return self._blocks(request) * sum(held for _, held, _ in self._layers())

    def lacks(self, *requests: Request) -> int:
        """Return how many bytes requests lack even if they run alone; 0 without a limit, or if full attention needs no host
        memory."""
        limit = self.kv.settings.host_bytes
        return 0 if limit is None or self.kv.chooser.full else max(0, self._on_host(requests) - limit)

    def fits(self, request: Request, placed: Sequence[Request], away: Sequence[Request] = ()) -> bool:
        """Return whether a request has all memory that it may need, together with the requests that have slots.

        placed: requests that have slots.
        away: swapped-out requests, whose host memory counts until they return.
        """
        every, kv = [request, *placed], self.kv
        if not placed:
            return True
        if self._stays_full(every):
            room = kv.chooser.block_room()
            return room is None or sum(map(self._blocks, every)) * kv.settings.block_size <= room
        if kv.offloaded and not kv.sequences.divided:
            return False  # the first prompt tells the sizes
        if kv.settings.host_bytes is not None:
            held = sum(one.swapped.host_bytes() for one in away if one.swapped is not None and one is not request)
            return self._on_host(every) + held <= kv.settings.host_bytes
        kv.finish_clear()  # free what ended requests held
        free, new = kv.streams.memory.free(), sum(max(0, self._blocks(one) - self._has(one)) for one in every)
        if free is None or kv.chooser.full:
            return free is None or self._on_host(every) <= free
        return sum(layer.store.host_need(new) for layer in kv.allocated) <= free

    def leaves_room(self) -> bool:
        """Return whether named entries leave host memory for a request of maximum length, or half of it. They then block no
        other request forever."""
        kv, limit = self.kv, self.kv.settings.host_bytes
        longest = kv.settings.in_blocks(kv.sequences.room) // kv.settings.block_size
        return limit is None or self._blocks_on_host(longest) <= limit or 2 * self._blocks_on_host(0) <= limit

    def _blocks(self, request: Request) -> int:
        settings = self.kv.settings
        return settings.in_blocks(request.prompt + request.spec.limit) // settings.block_size

    def _has(self, request: Request) -> int:
        layers = self.kv.offloaded
        return layers[0].store.reserved(request.seq) // self.kv.settings.block_size if layers and request.seq >= 0 else 0

    def _layers(self) -> list[tuple[int, int, int]]:
        """Return (number, host bytes per block, blocks that fit on the device) of each layer under the method, in force or
        not.

        The device has the memory that full attention frees.
        """
        kv, device = self.kv, self.kv.streams.device
        if kv.chooser.full:
            sizes = [(layer.number, kv.chooser.block_bytes(place)) for place, layer in kv.chooser.by_method.items()]
        else:
            sizes = [(layer.number, layer.store.block_bytes) for layer in kv.allocated]
        found = []
        for number, size in sizes:
            room = device.share(number) + (device.fixed.get(number, 0) if kv.chooser.full else 0)
            near = max(0, room) // size if self._on_device and device.bytes else 0
            found.append((number, held_bytes(size, pinned=self._pinned), near))
        return found

    def _on_host(self, requests: Sequence[Request]) -> int:
        """Return the bytes of host memory that requests may take, together with the pinned entries of the prefix cache."""
        return self._blocks_on_host(sum(map(self._blocks, requests)))

    def _blocks_on_host(self, blocks: int) -> int:
        """Return the bytes of host memory for `blocks` blocks of each layer, together with the pinned entries of the prefix
        cache."""
        layers = self._layers()
        kept, sizes, copied = 0, dict[int, int](), 0
        if self.prefix_cache is not None:
            kept, sizes = self.prefix_cache.pinned_blocks()
            copied = max((held for _, held, _ in layers), default=0)  # of a shared block that a sequence starts to write into
        others = sizes.keys() - {number for number, _, _ in layers}
        held = sum(kept * held_bytes(sizes[number], pinned=self._pinned) for number in others)
        return held + copied + sum(max(0, blocks + kept - near) * held for _, held, near in layers)

    def _stays_full(self, requests: Sequence[Request]) -> bool:
        """Return whether full attention is in force, and stays in force until these requests have all their tokens."""
        crossing = self.kv.settings.full_below
        if crossing is None or not self.kv.chooser.full:
            return False
        return sum(one.prompt + one.spec.limit for one in requests) <= crossing.total(len(requests))
