"""KV of one layer: sink and ring on the device, everything on the host, what stands between in an index.

How tokens come in (a dense pass; one at a time), how a full ring's oldest leave it, and how they are forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from kvthaw.cache.clock import Clock
from kvthaw.cache.dense import WATCHED, DenseLayer, padded, watch
from kvthaw.cache.feed import Feed
from kvthaw.cache.group import Group
from kvthaw.cache.host import HostStore
from kvthaw.cache.lanes import Lanes, roomier
from kvthaw.cache.pipeline import Pipeline
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.rotary import Rotary
from kvthaw.cache.spares import Spares
from kvthaw.errors import CacheError, HostMemoryError
from kvthaw.types import LayerShape


class FrozenKV(Lanes):
    """The tokens of one layer and where they stand; kvthaw.cache.layer attends to them.

    leader: the anchor whose index and choices this layer follows; None: it has its own. room: tokens a lane to make room for at
    once, 0 where that is not known.
    """

    def __init__(
        self, number: int, settings: Settings, pipeline: Pipeline, clock: Clock, leader: FrozenKV | None = None
    ) -> None:
        self.number, self.settings, self.pipeline, self.clock, self.leader = number, settings, pipeline, clock, leader
        self.rotary: Rotary | None = None  # for a method that asks for it
        self.room = 0
        self.positions: int | None = None  # of the model: no sequence needs more slots
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        Lanes.__init__(self)
        self.plan: Plan | None = None
        self.group: Group | None = None
        self.feed: Feed | None = None  # of an anchor
        self.watched: dict[int, Tensor] = {}  # of each lane, its prompt's last queries, [Hq, W, D]
        self.scale = 0.0
        self._start: list[int] = []  # where each lane's ring began at its last dense pass
        self._ahead: dict[int, int] = {}  # lanes whose index has what leaves with the next token -> rows in the store before
        self._finite: Tensor | None = None
        self.untouched = False  # all there is came as one prompt
        self.prompted = False  # the first prompt has come
        self._spares = Spares(self.number, self.pipeline)

    # What is where

    def indexed(self, lane: int, length: int | None = None) -> int:
        """Where the lane's ring begins: positions [sink, this) are in the retrieval region."""
        assert self.plan is not None
        n = self.length(lane) if length is None else length
        return self.plan.regions.indexed(self._start[lane], n)

    def held(self, lane: int, length: int | None = None) -> int:
        """Tokens of the lane that stand in sink and ring, when it has so many."""
        assert self.plan is not None
        n = self.length(lane) if length is None else length
        return min(n, self.plan.regions.sink) + max(0, n - self.indexed(lane, n))

    def settle(self) -> None:
        """Wait until everything is offloaded and indexed. Raises CacheError where keys or values were not finite."""
        self._check_finite()
        self.wait_for_copies()
        if self.group is not None:
            self.group.settle()

    def _check_finite(self) -> None:
        if self._finite is not None:
            if not self._finite:
                raise CacheError(f"the model gave keys or values that are not finite in layer {self.number}")
            self._finite = None

    def nonfinite(self) -> Tensor | None:
        """[1] int32 on the device: 1 once a decoded key or value was not finite; None before the first prompt."""
        return self.slab.tickets[-1:] if self.plan else None

    def read(self, lane: int, start: int, stop: int) -> Tensor:
        """Rows [H, stop - start, 2, D] of a lane, wherever they lie; on the host or on the device."""
        assert self.plan is not None
        if self.settings.method.evicts:
            return self.slab.read(lane, start, stop)
        self.wait_for_copies()
        stored = min(max(self.store.length(lane), start), stop)
        if stored == stop:
            return self.store.read(lane, start, stop)
        if stored == start:
            return self.slab.read(lane, start, stop)
        ring = self.slab.read(lane, stored, stop)
        return torch.cat((self.store.read(lane, start, stored).to(ring.device), ring), dim=1)

    def past(self, lane: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [1, H, n, D] of positions 0 .. stop on the device, in blocks: from the host as far as they are there, the
        rest from the ring. What a method has evicted is left out. Each is good until the next is asked for."""
        assert self.plan is not None
        sink = min(self.plan.regions.sink, stop)
        if self.settings.method.evicts:
            stored, held = 0, [(0, sink), (max(sink, min(self.indexed(lane), stop)), stop)]
        else:
            stored = min(self.store.length(lane), stop)
            held = [(stored, stop)]
        blocks = self.pipeline.past.blocks(self.store, lane, stored, self.slab.data.device, self.store.arriving)
        pieces = (self.slab.read(lane, *span) for span in held if span[0] < span[1])
        return ((rows[None, :, :, 0], rows[None, :, :, 1]) for rows in chain(blocks, pieces))

    def device_bytes(self) -> int:
        """Bytes of KV on the device: sink, ring and pool."""
        return self.slab.data.nbytes if self.plan else 0

    def host_bytes(self, lane: int | None = None) -> int:
        """Bytes of KV on the host, of one lane or of all."""
        return self.store.nbytes(lane) if self.plan else 0

    # Tokens that come

    def begin(self, query: Tensor, key: Tensor, left_pad: list[int], scale: float) -> None:
        """Take the sizes from a first prompt: query [., Hq, T, D], key [., H, T, D]. left_pad: of all lanes."""
        _, heads, steps, dim = key.shape
        batch, lengths = len(left_pad), {max(steps, self.coming) - pad for pad in left_pad}
        if isinstance(self.settings.budget, float) and len(lengths) > 1:
            raise CacheError(
                f"budget is {self.settings.budget}, a fraction of the prompt, but the rows' prompts differ in length"
            )
        plan, method, device = self.settings.plan(max(lengths)), self.settings.method, key.device
        most = self.room or self.positions
        if most is not None:
            window = min(plan.regions.window, most)
            plan = Plan(replace(plan.regions, window=window), min(plan.rows, most))
        self.left_pad, self.scale = left_pad, scale
        self._start = [plan.regions.sink] * batch
        pinned = device.type == "cuda"
        extent, memory = self.settings.extent, self.pipeline.memory
        self.store = HostStore(batch, heads, dim, key.dtype, extent=extent, pinned=pinned, memory=memory)
        self.slab = Slab(batch, heads, dim, plan.regions, plan.rows * max(1, method.keep), dtype=key.dtype, device=device)
        if not method.evicts:
            self.store.prepare(self.slab, self.pipeline.together)
        if method.index is not None:
            if self.leader is None:
                sizes = (self.number, query.shape[1], heads, dim, key.dtype, device)
                shape = LayerShape(
                    *sizes,
                    self.store,
                    plan.regions,
                    scale,
                    self.settings.seed,
                    plan.rows,
                    self.slab,
                    self.clock,
                    self.pipeline.side,
                    self.pipeline.together,
                    self.rotary,
                )
                self.group = Group(method, shape, batch, plan.rows, self.pipeline)
                self.feed = Feed(self.group, self.store, self.slab, self.pipeline.together)
            else:
                self.group = self.leader.group
        self.plan, self.capacity = plan, self.room or roomier(0, max(steps, self.coming))
        self.make_room()

    def make_room(self) -> None:
        """For `capacity` tokens a lane: until there are more, nothing that a step reads moves."""
        if self.feed is not None:
            self.feed.group.make_room(self.capacity)

    def copy_from(self, other: FrozenKV | DenseLayer) -> None:
        """Take over the tokens of another layer, as if they had been this layer's prompt. What a dense layer has offloaded for one
        fork is shared by the others; an index that serves as it is is not built again."""
        if other.seen == 0:
            return
        if isinstance(other, FrozenKV):
            other.settle()
            if other.settings.method.evicts:
                raise CacheError(f"{other.settings.method.name} has dropped tokens, so its cache cannot be forked")
            if self.serves_as_it_is(other):
                self._take_over(other)
                return
        queries, key, value = padded(other)
        self.begin(queries, key, list(other.left_pad), other.scale)
        if isinstance(other, DenseLayer) and not self.settings.method.evicts:
            self.store.share(other.offloaded(self.settings.extent))
        self.take_in(queries, key, value)

    def serves_as_it_is(self, other: FrozenKV) -> bool:
        """Whether another layer's index is what this layer's would be: of the same method object, whose index serves any budget, of
        the same regions, and built of one prompt that nothing has followed."""
        mine, its, plan = self.settings, other.settings, other.plan
        same = mine.method is its.method and mine.method.any_budget and (mine.seed, mine.extent) == (its.seed, its.extent)
        return same and other.untouched and plan is not None and mine.plan(other.longest).regions == plan.regions

    def _take_over(self, other: FrozenKV) -> None:
        """Become what the other layer is, but for the number of rows; the host's rows are shared."""
        assert other.plan is not None
        queries, held = next(iter(other.watched.values())), other.slab.keys
        key = held[:, :, :1].expand(-1, -1, other.seen, -1)  # of the prompt's shape
        self.begin(queries[None], key, list(other.left_pad), other.scale)
        self.store.share(other.store)
        always = other.slab.pool_start
        self.slab.data[:, :, :always] = other.slab.data[:, :, :always]
        self.seen, self._start, self.watched, self.untouched = other.seen, list(other._start), dict(other.watched), True
        self.prompted = True
        if self.feed is not None and other.feed is not None:
            self.feed.group.take_over(other.feed.group)
            self.make_room()

    def take_in(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Tokens of a dense pass become part of the cache."""
        assert self.plan is not None
        self.fall_back()
        before, steps = self.seen, key.shape[2]
        self.untouched = before == 0 and not self.coming
        self._check(key, value)
        for lane in range(self.lanes):
            pad = min(steps, max(0, self.left_pad[lane] - before))
            if pad < steps:
                self._take_lane(lane, query[lane, :, pad - steps :], key[lane, :, pad:], value[lane, :, pad:], before + pad)
        self.seen += steps
        self.prompted = self.prompted or not self.coming
        if self.prompt and not self.coming:
            self._renew()

    def take_row(self, lane: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Tokens of a dense pass of one lane become part of it, [1, ., T, D] each; the lane's length is set by the caller."""
        self.untouched = False
        self._check(key, value)
        self._take_lane(lane, query[0], key[0], value[0], self.seen)

    def clear(self, lane: int) -> None:
        """Forget the tokens of a lane; nothing of them stays that another row could see, and no tensor moves."""
        if self.plan is None:
            return
        self.untouched = False
        self.slab.tickets.zero_()
        self.wait_for_copies()
        if self.feed is not None:
            self.feed.clear(lane)
        self.store.truncate(lane, 0)
        self.watched.pop(lane, None)
        self._start[lane] = self.plan.regions.sink
        self._ahead.pop(lane, None)

    def recover(self) -> None:
        """Forget that a prompt failed, whose lane will be cleared."""
        self._finite = None
        if self.group is not None:
            self.group.recover()

    def _check(self, key: Tensor, value: Tensor) -> None:
        finite = torch.isfinite(key).all() & torch.isfinite(value).all()
        self._finite = finite if self._finite is None else self._finite & finite

    def _take_lane(self, lane: int, query: Tensor, k: Tensor, v: Tensor, before: int) -> None:
        """Tokens [., n, D] of a lane, the first of which stands behind `before` padded tokens."""
        assert self.plan is not None
        regions, past = self.plan.regions, before - self.left_pad[lane]
        self.watched[lane] = watch(self.watched.get(lane), query)
        length, old = past + k.shape[1], self.indexed(lane, past) if past else regions.sink
        new = regions.first_indexed(length)
        if not self.settings.method.evicts:
            self._store_rings({lane: past})
            shared = self.store.length(lane) - past
            self.pipeline.offload(self.store, lane, k[:, shared:], v[:, shared:])
            self._spares.take(self.store, regions, lane, length)
        if self.feed is not None and new > old:
            more = max(0, self.prompt - before - k.shape[1])
            self.feed.take(lane, old, new, k, v, past, query[:, -WATCHED:], more)
        sink = max(0, min(regions.sink, length) - past)
        if sink:
            self.slab.write(lane, past, torch.stack((k[:, :sink], v[:, :sink]), dim=2))
        ring = max(new, past)
        if ring < length:
            self.slab.write(lane, ring, torch.stack((k[:, ring - past :], v[:, ring - past :]), dim=2))
        self._start[lane] = new

    @property
    def _stale(self) -> set[int]:
        """Lanes to be indexed anew before the next step."""
        return set() if self.feed is None else self.feed.stale

    def _renew(self) -> None:
        if self.feed is not None:
            self.feed.renew({lane: self.indexed(lane) for lane in self.feed.stale}, self.watched)

    # Tokens that leave the ring

    def due(self) -> bool:
        """Whether one more token asks for work on the host first: a full ring, or tables that must grow."""
        return (
            self.capacity <= self.longest
            or self._finite is not None
            or not self.store.ordered
            or bool(self._stale)
            or bool(self._leaving())
        )

    def before_step(self) -> None:
        """That work, done once however often it is asked for. Afterwards a step of one token is work of the device alone, where the
        index is graph-safe."""
        self._renew()
        self.pipeline.past.release()
        self._leave(self._leaving())
        self._check_finite()
        self.order_copies()
        if self.group is not None:
            self.group.settle()
        if self.capacity <= self.longest:
            self.capacity = roomier(self.capacity, self.longest + 1)
            self.make_room()

    def _leaving(self, more: int = 0) -> list[int]:
        """Lanes whose ring is full when so many more tokens have come, and has not given up yet what leaves with the next."""
        if self.plan is None:
            return []
        regions, tokens = self.plan.regions, self.seen + more
        places = enumerate(zip(self._start, self.left_pad, strict=True))
        full = (lane for lane, (start, pad) in places if regions.full(start, tokens - pad))
        return [lane for lane in full if more or lane not in self._ahead]

    def undisturbed(self, tokens: int) -> int:
        """How many of the next tokens ask an index of what it was given so far: before the others, something leaves the ring."""
        return next((t for t in range(tokens) if self._stale or self._leaving(t)), tokens)

    def advance(self) -> None:
        """Make room for one new token a lane and count it; the step's attention writes it."""
        if self.due():
            self.before_step()
        self.take_one()

    def take_one(self) -> None:
        """Count a token of every lane; what left for it has left."""
        self.untouched = False
        self.count_token()
        self._spares.count_step()
        self._ahead.clear()

    def take_spares(self) -> None:
        """Behind a step: a lane whose turn it is takes the extent of the host's that it will need before its next turn."""
        if not self._spares.due or (self.store.pinned and torch.cuda.is_current_stream_capturing()):
            return  # where a step is captured nothing can be page-locked; afterwards this is asked for again
        assert self.plan is not None
        for lane in self._spares.turns(self.store, self.plan.regions):
            if lane not in self.idle and not self.settings.method.evicts:
                self._spares.take(self.store, self.plan.regions, lane, self.length(lane))

    @property
    def reversible(self) -> bool:
        """Whether what goes ahead can be taken back exactly."""
        if self.feed is None:
            return True
        index = self.feed.group.reverses
        return index is not None and index.reversible

    def go_ahead(self) -> None:
        """Where a ring has become full, offload and index what the next token will push out of it, while the device is still at
        work: an index on the host takes as long as a layer's whole step, and thirty launches a layer the host as long as a step.
        Where there is no host memory for it, nothing happens: that is an error of the next token's, if it comes."""
        with suppress(HostMemoryError):
            self._leave([lane for lane in self._leaving() if lane not in self._stale])

    def catch_up(self) -> None:
        """What indexes put off to do it for several layers at once is done, of all layers of the cache."""
        if self.feed is not None and self.feed.group.shape.together is not None:
            self.feed.group.shape.together.do()

    def fall_back(self) -> None:
        """Undo that where something else than the next token comes."""
        if self._ahead:
            self.wait_for_copies()
        for lane, stored in self._ahead.items():
            if self.feed is not None:
                self.feed.take_back(lane, self.indexed(lane))
            self.store.truncate(lane, stored)
        self._ahead.clear()

    def _leave(self, lanes: list[int]) -> None:
        """The oldest tokens of full rings leave for the retrieval region."""
        stored = {lane: self.store.length(lane) for lane in lanes}
        if lanes and not self.settings.method.evicts:
            self._pass_on(lanes)
        self._ahead.update(stored)

    def _pass_on(self, lanes: list[int]) -> None:
        """Offload and index them."""
        assert self.plan is not None
        self.untouched = False
        starts, n = [self.indexed(lane) for lane in lanes], self.plan.regions.buffer
        spans = {lane: (start, start + n) for lane, start in zip(lanes, starts, strict=True)}
        self._store_rings({lane: stop for lane, (_, stop) in spans.items()})
        if self.feed is not None:
            self.feed.leave(spans, self.watched)

    def _store_rings(self, lengths: dict[int, int]) -> None:
        """Offload what of the first so many tokens of each lane stands in sink or ring only."""
        stored = [(lane, self.store.length(lane), length) for lane, length in lengths.items()]
        spans = [(lane, start, stop - start) for lane, start, stop in stored if start < stop]
        if not spans:
            return
        self.order_copies()
        self.store.freeze(self.slab, spans, self.pipeline.together)
        if self.slab.data.is_cuda:  # on the current stream: a few rows, before the next step writes in their places
            copied = torch.cuda.Event()
            copied.record()
            self.store.arrive(copied, ordered=True)

    def reserved(self, lane: int) -> int:
        """Tokens of a lane that its blocks on the host have room for."""
        return self.store.reserved(lane) if self.plan else 0

    def reserve(self, steps: int) -> bool:
        """Allocate the host blocks for what the next `steps` tokens, one by one, push out of the rings; return whether any do.
        Raises HostMemoryError before anything has changed."""
        if self.plan is None or self.settings.method.evicts:
            return False
        ends = {lane: self.indexed(lane, self.length(lane) + steps) for lane in range(self.lanes) if lane not in self.idle}
        ends = {lane: end for lane, end in ends.items() if end > self.indexed(lane)}
        for lane, end in ends.items():
            if end > self.store.length(lane):
                self.store.claim(lane, end)
        return bool(ends)

    def wait_for_copies(self) -> None:
        """The host reads what was copied to it."""
        if self.plan is not None:
            self.store.wait()

    def order_copies(self) -> None:
        """The device reads what was copied to the host; the host does not wait."""
        self.store.order(self.slab.data.device)

    # Changes from outside

    def check_crop(self, drop: int) -> None:
        """Raise CacheError where crop(drop) would need tokens that the method has dropped."""
        if self.plan is None or not self.settings.method.evicts:
            return
        sink = self.plan.regions.sink
        if any(max(0, self.length(lane) - drop) < self.indexed(lane) > sink for lane in range(self.lanes)):
            raise CacheError(f"{self.settings.method.name} has dropped the tokens that crop({-drop}) would bring back")

    def crop(self, drop: int) -> None:
        """Forget the last `drop` tokens of every lane; the window is refilled from the store."""
        if self.plan is None or drop <= 0:
            return
        self.check_crop(drop)
        self.fall_back()
        self.slab.tickets.zero_()
        self.untouched, self.era = False, object()
        olds, lengths = ([of(lane) for lane in range(self.lanes)] for of in (self.indexed, self.length))
        lengths = [max(0, length - drop) for length in lengths]
        if self.settings.method.evicts:
            self._start = olds
        else:
            for lane, (old, length) in enumerate(zip(olds, lengths, strict=True)):
                self._crop_lane(lane, old, length)
        self.seen = max(0, self.seen - drop)
        self.left_pad = [min(pad, self.seen) for pad in self.left_pad]
        if self.seen == 0:
            self.reset()

    def _crop_lane(self, lane: int, old: int, length: int) -> None:
        """Keep `length` tokens of a lane whose ring begins at `old`; afterwards it begins where it would without the others."""
        assert self.plan is not None
        regions = self.plan.regions
        self._start[lane] = min(self._start[lane], regions.first_indexed(length))
        new = regions.indexed(self._start[lane], length)
        self.wait_for_copies()
        if self.group is not None:
            self.group.settle()
        if new < old and self.feed is not None:
            self.feed.truncate(lane, new)
        if new < min(old, length):
            self.slab.write(lane, new, self.store.read(lane, new, min(old, length)))
        if self.store.length(lane) > length:
            self.store.truncate(lane, length)

    def reorder(self, lanes: list[int]) -> None:
        """Lane i becomes what lane lanes[i] was; lanes may repeat and may be fewer or more."""
        if self.plan is None:
            return
        self.era = object()
        self.wait_for_copies()
        if self.group is not None:
            self.group.settle()
        if self.feed is not None:
            self.feed.reorder(lanes)
        self.store.reorder(lanes)
        self.slab.reorder(torch.tensor(lanes, device=self.slab.data.device))
        self._spares.reorder()
        self.left_pad = [self.left_pad[lane] for lane in lanes]
        self._start = [self._start[lane] for lane in lanes]
        self._ahead = {i: self._ahead[lane] for i, lane in enumerate(lanes) if lane in self._ahead}
        self.watched = {i: self.watched[lane] for i, lane in enumerate(lanes) if lane in self.watched}

    @property
    def chooses(self) -> bool:
        """Whether this layer has an index of its own, where the method has one."""
        return self.leader is None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.wait_for_copies()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin
