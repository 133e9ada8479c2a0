"""What a layer gives its index: a prompt at once or in chunks, what leaves a full ring, all of a lane anew."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvthaw.cache.group import Group
from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.cache.together import Together


class Feed:
    """Keys and values on their way to the index of a group, from its anchor's passes, ring and store.

    An index on the host reads them from the store itself, once they have arrived there, and is given their number alone.
    """

    def __init__(self, group: Group, store: HostStore, slab: Slab, together: Together) -> None:
        self.group, self.store, self.slab, self.together = group, store, slab, together
        self.first = slab.regions.sink
        self.stale: set[int] = set()
        """Lanes to be indexed anew before the next step."""

    def take(self, lane: int, old: int, new: int, k: Tensor, v: Tensor, past: int, queries: Tensor, more: int) -> None:
        """Give the index positions [old, new): some may stand in the ring, the rest are k, v [H, n, D] from position `past` on.
        queries [Hq, W, D]: the last ones. more: tokens of the same prompt that are still to come.

        Where an index of one piece is better than one that was appended to, a lane that a prompt in chunks makes much longer is
        indexed anew, once: with the last chunk if the prompt was announced, else before the next step that asks."""
        index = self.group.index
        much = (old > self.first or more > 0) and 4 * (new - old + more) > old - self.first
        if not index.grows and (lane in self.stale or much):
            self.stale.add(lane)
            return
        if index.on_host:
            keys = values = self._nothing(new - old)[:, :, 0]
        else:
            keys, values = k, v
            if old < past:
                ring = self.slab.read(lane, old, past)
                keys, values = torch.cat((ring[:, :, 0], k), dim=1), torch.cat((ring[:, :, 1], v), dim=1)
            begin = min(old, past)
            keys, values = keys[:, old - begin : new - begin], values[:, old - begin : new - begin]
        if old == self.first:
            self._build(lane, keys, values, queries)
        else:
            self._append([lane], keys[None], values[None], queries[None])

    def leave(self, spans: dict[int, tuple[int, int]], watched: dict[int, Tensor]) -> None:
        """Give the index what leaves the rings of some lanes: positions [start, stop), as many in each. watched: of lanes, their
        prompts' last queries [Hq, W, D]."""
        index = self.group.index
        for lane, (start, stop) in spans.items():
            if start == self.first:  # the first tokens of a lane that had none to index
                own = self._nothing(stop - start) if index.on_host else self.slab.read(lane, start, stop)
                self._build(lane, own[:, :, 0], own[:, :, 1], self._queries(watched, lane))
        known = [(lane, start) for lane, (start, _) in spans.items() if start > self.first]
        if known:
            lane, start = known[0]
            n = spans[lane][1] - start
            if index.on_host:
                rows = self._nothing(n).expand(len(known), -1, -1, -1, -1)
            else:
                rows = self.slab.read_lanes(known, n, self.together)
            self._append([lane for lane, _ in known], rows[:, :, :, 0], rows[:, :, :, 1], None)

    def renew(self, ends: dict[int, int], watched: dict[int, Tensor]) -> None:
        """Index the stale lanes anew, from the store, up to the ends given; then none is."""
        for lane in sorted(self.stale):
            end = ends[lane]
            rows = self._nothing(end - self.first) if self.group.index.on_host else self._stored(lane, self.first, end)
            self._build(lane, rows[:, :, 0], rows[:, :, 1], self._queries(watched, lane))
        self.stale.clear()

    def take_back(self, lane: int, start: int) -> None:
        """What left last, which began at position `start`, as if it had not."""
        if start > self.first:
            self.group.undo(lane, start)
        else:
            self.group.truncate(lane, 0)

    def truncate(self, lane: int, end: int) -> None:
        """Have the index forget positions >= end of a lane. One without positions to index is no longer stale."""
        self.group.truncate(lane, end if end > self.first else 0)
        if end <= self.first:
            self.stale.discard(lane)

    def clear(self, lane: int) -> None:
        """Have the index forget a lane."""
        self.group.truncate(lane, 0)
        self.stale.discard(lane)

    def reorder(self, lanes: list[int]) -> None:
        """Lane i becomes what lane lanes[i] was."""
        self.group.reorder(lanes)
        self.stale = {i for i, lane in enumerate(lanes) if lane in self.stale}

    def _build(self, lane: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        index = self.group.index
        self.group.submit(self.store.arriving, partial(index.build, lane, self.first, keys, values, queries))

    def _append(self, lanes: list[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        index = self.group.index
        self.group.submit(self.store.arriving, partial(index.append, lanes, keys, values, queries))

    def _nothing(self, rows: int) -> Tensor:
        return self.slab.data.new_empty((self.slab.data.shape[1], rows, 2, 0))

    def _queries(self, watched: dict[int, Tensor], lane: int) -> Tensor:
        """The last queries of a lane's prompt, [Hq, W, D]; none of a lane that had none."""
        shape = self.group.shape
        return watched.get(lane, self.slab.data.new_empty((shape.q_heads, 0, shape.head_dim)))

    def _stored(self, lane: int, start: int, stop: int) -> Tensor:
        """Rows [H, stop - start, 2, D] of a lane that are in the store, on the device; the host waits for none of them."""
        data = self.slab.data
        if not data.is_cuda:
            return self.store.read(lane, start, stop)
        if self.store.arriving is not None:
            torch.cuda.current_stream(data.device).wait_event(self.store.arriving)
        rows = data.new_empty((data.shape[1], stop - start, *data.shape[3:]))
        self.store.copy_to(rows, lane, start)
        return rows
