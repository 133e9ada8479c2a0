"""Whether the memory of a running batch has room for another request, until its last token."""

from __future__ import annotations

from collections.abc import Sequence

from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.hf.batch_cache import BatchCache
from kvthaw.engine.request import Request


class Admission:
    """Counts what requests may take until their last tokens against host and device memory.

    Only blocks of KV are counted, wherever they lie; all else is allocated for the whole batch when the first request joins. The
    limit is host_bytes, or what the system has free, and what of device_memory is left to blocks. Under method="auto" requests
    count while full attention is in force too, unless they cannot pass its end.
    """

    def __init__(self, cache: BatchCache, prefix_cache: PrefixCache | None) -> None:
        self.kv, self.prefix_cache = cache.kv, prefix_cache

    def need(self, request: Request) -> int:
        """Return the most bytes that a request's KV may take in whole blocks; 0 where that is not known yet."""
        return self._tokens(request) * self._token_bytes

    def most(self) -> int | None:
        """Return the bytes of blocks that there can ever be; None where there is no limit, or full attention may go on without."""
        limit, kept = self.kv.settings.host_bytes, self.prefix_cache
        if limit is None or self.kv.chooser.full:
            return None
        return limit - (0 if kept is None else kept.pinned_bytes) + self._on_device

    def fits(self, request: Request, placed: Sequence[Request]) -> bool:
        """Return whether a request finds all memory that it may need beside those that have places."""
        every, kv = [request, *placed], self.kv
        if not placed or self._stays_full(every):
            return True
        if kv.offloaded and kv.sequences.regions is None:
            return False  # the first prompt tells the sizes
        limit = kv.settings.host_bytes
        if limit is not None:
            pinned = 0 if self.prefix_cache is None else self.prefix_cache.pinned_bytes
            return pinned + sum(map(self.need, every)) <= limit + self._on_device
        free, rooms = kv.streams.memory.free(), (max(0, layer.storage.room) for layer in kv.offloaded if layer.plan)
        return free is None or sum(map(self._missing, every)) <= free + sum(rooms)

    def _tokens(self, request: Request) -> int:
        return self.kv.settings.in_blocks(request.prompt + request.limit)

    def _missing(self, request: Request) -> int:
        """Return the bytes of blocks that a request may take beside those that it has."""
        layers = self.kv.offloaded
        have = layers[0].reserved(request.seq) if layers and request.seq >= 0 else 0
        return max(0, self._tokens(request) - have) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        kv, crossing = self.kv, self.kv.settings.full_below
        if not kv.chooser.full:
            return sum(layer.host_bytes_per_token() for layer in kv.offloaded)
        return 0 if crossing is None or kv.settings.method.evicts else crossing.token_bytes * len(kv.chooser.by_method)

    @property
    def _on_device(self) -> int:
        """Bytes of blocks that the device may hold, once full attention's KV is gone."""
        device, full = self.kv.streams.device, self.kv.chooser.full
        numbers = [layer.number for layer in self.kv.chooser.by_method.values()] if device.bytes else []
        return sum(max(0, device.share(i) + (device.fixed.get(i, 0) if full else 0)) for i in numbers)

    def _stays_full(self, requests: Sequence[Request]) -> bool:
        """Return whether full attention is in force, and stays so until these requests have all their tokens."""
        crossing = self.kv.settings.full_below
        if crossing is None or not self.kv.chooser.full:
            return False
        return sum(one.prompt + one.limit for one in requests) <= crossing.total(len(requests))
