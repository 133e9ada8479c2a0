"""One attention layer: what happens to a new token, and what a query attends to. The file to read first.

A decode step, start to finish:

    ring full?            its oldest tokens leave for the retrieval region, are offloaded and indexed
    query    -> index     -> rows -> residency: which of them are on the device already?
             -> transfer brings the others
             -> attention: new K, V enter the ring; the query attends to sink + ring + selected rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.clock import Clock
from kvthaw.cache.foreseen import Foreseen
from kvthaw.cache.frozen import FrozenKV
from kvthaw.cache.group import Choice
from kvthaw.cache.pipeline import Pipeline
from kvthaw.cache.plan import Settings
from kvthaw.cache.transfer import BulkCopy, UvaGather
from kvthaw.errors import ConfigError
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.dense import causal_attention, continued
from kvthaw.kernels.places import Newest
from kvthaw.kernels.sparse_decode import sparse_decode
from kvthaw.types import Transfer


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer of the model attends: softmax scale, Gemma's softcap, gpt-oss's sink logits [Hq]."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class FrozenLayer(FrozenKV):
    """Attention over KV that is frozen on the host beyond sink and ring."""

    def __init__(
        self, number: int, settings: Settings, pipeline: Pipeline, clock: Clock, leader: FrozenLayer | None = None
    ) -> None:
        super().__init__(number, settings, pipeline, clock, leader)
        self.observer: Callable[[FrozenLayer, Tensor, Choice | None], None] | None = None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.verifying = False  # tokens that come are candidates of assisted decoding
        self._asked_again = False  # by a layer that shares this layer's KV: the index may not go ahead of the ring
        self.foreseen: Foreseen | None = None  # to ask the index with instead of the coming tokens' queries
        self.sparse_steps = self.dense_tokens = 0
        self.held_steps = self.held_sum = self.held_max = 0  # tokens attended in sink and ring, over lanes and steps
        self._transfer: Transfer | None = None

    def begin(self, query: Tensor, key: Tensor, left_pad: list[int], scale: float) -> None:
        """As FrozenKV.begin."""
        if self.settings.method.index is not None:
            self._transfer = (self.settings.method.transfer or UvaGather)() if key.is_cuda else BulkCopy()
        super().begin(query, key, left_pad, scale)

    def make_room(self) -> None:
        """As FrozenKV.make_room."""
        super().make_room()
        if isinstance(self._transfer, UvaGather):
            self._transfer.make_room(self.store, self.capacity, self.slab.data.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, left_pad: list[int], how: Attention, fresh: bool) -> Tensor:
        """Attend to everything up to each query. query [B, Hq, T, D]; key, value [B, H, n, D], the last T of them the same tokens'.

        fresh: the tokens are new and become part of the cache; else a layer that shares this layer's KV asks again, perhaps with
        the last queries only. left_pad: of each lane, as far as it is known. Returns [B, Hq, T, D]; queries that are padding get 0.
        """
        steps = query.shape[2]
        key, value = key[:, :, -steps:], value[:, :, -steps:]
        if self.plan is None:
            self.begin(query, key, left_pad, how.scale)
        before = self.seen if fresh else self.seen - steps
        assert self.plan is not None
        if not fresh:
            self._asked_again = True
            self.fall_back()
        if before < max(1, *left_pad) or not self.one_by_one(steps):
            if fresh:
                self.left_pad = left_pad
            self.fall_back()
            out = self._dense(query, key, value, before, how)
            if fresh:
                self.dense_tokens += steps if self.prompted else 0
                self.take_in(query, key, value)
            return out
        if self.group is not None and self.chooses and fresh:
            self.group.choices.clear()
        outs = []
        for t in range(steps):
            if fresh:
                self.advance()
            newest = key[:, :, t - steps], value[:, :, t - steps]
            outs.append(self._sparse(query[:, :, t], newest, before + t + 1, t, how))
            if fresh:
                self.take_spares()
        self.foreseen = None
        if fresh and self._on_host and self.goes_ahead and self.pipeline.recording is None:
            self.go_ahead()
        return torch.stack(outs, dim=2) if steps > 1 else outs[0][:, :, None]

    @property
    def _on_host(self) -> bool:
        return self.group is not None and self.group.index.on_host

    @property
    def goes_ahead(self) -> bool:
        """Whether what leaves with the next token may leave before it is known that one comes: if that can be taken back exactly,
        and where the index is on the host, whose trees forget it, but for their shape."""
        return not self._asked_again if self._on_host else self.reversible

    def one_by_one(self, steps: int) -> bool:
        """Whether so many tokens at once go through the index, where there are others before them."""
        if self.plan is None:
            return False
        return self.verifying or (steps <= min(self.settings.sparse_queries, self.plan.regions.window) and not self.prompt)

    def asks(self, steps: int) -> bool:
        """Whether an index of this layer's own is asked when so many tokens come."""
        return self.group is not None and self.chooses and self.one_by_one(steps)

    def foresee(self, queries: Tensor) -> None:
        """Have the index asked with these queries, [B, Hq, T, D], instead of the coming tokens' own. One on the host begins to
        search at once, beside the layer before, for as many of the tokens as come before it changes."""
        assert self.group is not None
        early = self.undisturbed(queries.shape[2]) if self.group.index.on_host else 0
        self.foreseen = Foreseen(queries, self.group.search(queries[:, :, :early]) if early else ())

    def fall_back(self) -> None:
        """As FrozenKV.fall_back; nor does the step come that was foreseen."""
        if self.foreseen is not None:
            self.foreseen.drop()
            self.foreseen = None
        super().fall_back()

    def fill(self, lane: int, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
        """A dense pass of one lane, whose next tokens are given, [1, ., T, D]; the others stay as they are. Returns [1, Hq, T, D].
        Their count enters by set_lengths(), when all layers have taken them in."""
        if self.plan is None:
            self.begin(query, key, self.left_pad, how.scale)
        out = self._dense_lane(lane, query, key, value, self.length(lane), how)
        self.take_row(lane, query, key, value)
        return out

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, before: int, how: Attention) -> Tensor:
        """Causal attention over all earlier tokens and the new ones, exact."""
        steps = query.shape[2]
        if before == 0 and not any(self.left_pad):
            return causal_attention(query, key, value, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
        out = torch.zeros_like(query)
        for lane in range(self.lanes):
            pad = min(steps, max(0, self.left_pad[lane] - before))
            past = max(0, before - self.left_pad[lane])
            if pad == steps:
                continue
            q, k, v = (x[lane : lane + 1, :, pad:] for x in (query, key, value))
            out[lane : lane + 1, :, pad:] = self._dense_lane(lane, q, k, v, past, how)
        return out

    def _dense_lane(self, lane: int, query: Tensor, key: Tensor, value: Tensor, past: int, how: Attention) -> Tensor:
        """The same of one lane that has `past` tokens, [1, ., T, D]."""
        if past == 0:
            return causal_attention(query, key, value, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
        past_kv = self.past(lane, past)
        return continued(query, key, value, past_kv, scale=how.scale, softcap=how.softcap, sinks=how.sinks)

    def _sparse(self, query: Tensor, newest: Newest, seen: int, t: int, how: Attention) -> Tensor:
        """One decode step: select, fetch, attend. query [B, Hq, D]; newest: key and value [B, H, D] of its token, which enter the
        ring (again, where another layer's queries come); seen: padded tokens up to it."""
        assert self.plan is not None
        if self._finite is not None:
            self.settle()
        self._count(seen)
        self.tick(seen)
        choice, visible, log_weight, partials = None, None, None, []
        if self.group is not None and self._transfer is not None:
            choice = self._choose(query, t) if self.chooses else self.group.choices[t].followed
            self.order_copies()
            slots, fetch = choice.host if choice.host and not self._transfer.graph_safe else (choice.slots, choice.fetch)
            self._transfer.fetch(self.store, self.slab, fetch, slots)
            if self.chooses and self.group.rebuilds is not None:
                self.group.rebuilds.rebuild(self.slab, choice.fetch, choice.slots)
            visible, selection = choice.live, choice.selection
            if selection.partial is not None:
                if how.softcap is not None:
                    raise ConfigError(
                        f"{self.settings.method.name} attends to some tokens itself, without the softcap of {how.softcap} that the "
                        "model has; it works with models that have none"
                    )
                partials.append(selection.partial)
            if selection.log_weight is not None:
                log_weight = self._by_place(selection.log_weight, choice)
        step = DecodeStep(
            query,
            self.slab.keys,
            self.slab.values,
            scale=how.scale,
            newest=newest,
            visible=visible,
            lengths=self.clock.length,
            starts=self.clock.start,
            regions=self.plan.regions,
            softcap=how.softcap,
            sinks=how.sinks,
            log_weight=log_weight,
            partials=partials,
        )
        out = sparse_decode(step, self.slab.tickets)
        if self.observer is not None:
            self.observer(self, query, choice)
        return out

    def _choose(self, query: Tensor, t: int) -> Choice:
        assert self.group is not None
        length, live, foreseen = self.longest, sum(self.live), self.foreseen
        if foreseen is None:
            return self.group.choose(query, length, live)
        return self.group.choose(foreseen.queries[:, :, t], length, live, foreseen.search(t))

    def _count(self, seen: int) -> None:
        self.sparse_steps += 1
        for lane in range(self.lanes):
            if lane in self.idle:
                continue
            held = self.held(lane, seen - self.left_pad[lane])
            self.held_steps += 1
            self.held_sum += held
            self.held_max = max(self.held_max, held)

    def order_copies(self) -> None:
        """As FrozenKV.order_copies; but a transfer that gathers on the host has it wait."""
        if self._transfer is None or self._transfer.graph_safe:
            super().order_copies()
        else:
            self.wait_for_copies()

    def go_ahead(self) -> None:
        """As FrozenKV.go_ahead; a captured step that follows finds the addresses of new rows."""
        super().go_ahead()
        if isinstance(self._transfer, UvaGather):
            self.order_copies()
            self._know_addresses()

    def before_step(self) -> None:
        """As FrozenKV.before_step; where index and transfer are graph-safe, the device needs nothing more."""
        super().before_step()
        self._know_addresses()

    def _know_addresses(self) -> None:
        if isinstance(self._transfer, UvaGather):
            self._transfer.prepare(self.store, self.slab.data.device)

    def count_step(self) -> None:
        """Count a step of one token that the device took by itself."""
        self.take_one()
        self._count(self.seen)
        if self.group is not None and self.chooses:
            self.group.meter.tick(sum(self.live) * self.slab.data.shape[1])

    def tick(self, seen: int, coming: int | None = None) -> None:
        """Set the clock to the step whose newest token is the `seen`-th of the batch, with the rings as they are at `coming`, which
        is the next step where a captured one will advance the clock itself."""
        assert self.plan is not None
        at = self.seen if coming is None else coming
        lengths = tuple(seen - pad for pad in self.left_pad)
        starts = tuple(self.indexed(lane, at - pad) for lane, pad in enumerate(self.left_pad))
        self.clock.at(lengths, starts, self.slab.data.device, self.live)

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes at fixed addresses."""
        found = [self.slab.data, self.slab.tickets, *self.clock.tensors()]
        if self.rotary is not None:
            found += [self.rotary.cos, self.rotary.sin]
        if self.group is not None:
            found += self.group.tensors()
        if isinstance(self._transfer, UvaGather) and self._transfer.table is not None:
            found.append(self._transfer.table)
        return found

    def _by_place(self, log_weight: Tensor, choice: Choice) -> Tensor:
        """log_weight [B, Hq, M] moved to the places of the slab, [B, Hq, N]; 0 elsewhere."""
        batch, q_heads, _ = log_weight.shape
        heads, places = self.slab.data.shape[1:3]
        slot = torch.where(choice.slots >= 0, choice.slots + self.slab.pool_start, places).to(log_weight.device).long()
        slot = slot.repeat_interleave(q_heads // heads, dim=1)
        spread = torch.zeros((batch, q_heads, places + 1), dtype=torch.float32, device=log_weight.device)
        return spread.scatter_(2, slot, log_weight)[:, :, :places]
