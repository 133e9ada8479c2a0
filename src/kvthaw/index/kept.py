"""Choices that outlive their step: SnapKV and H2O keep some tokens and do not look at the others again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.index.units import grown
from kvthaw.kernels.stream_keys import stream_keys
from kvthaw.types import LayerShape, Selection

Agree = Literal["mean", "max"]
"""How the query heads of a group agree on a token: the mean or the largest of the attention that each pays to it."""
Pooling = Literal["avg", "max"]
_SCORES = 1 << 24  # float32 scores held at once


def observed(queries: Tensor, keys: Tensor, *, scale: float, agree: Agree) -> Tensor:
    """Attention that the last W of T tokens pay to each: queries [H, G, W, D], keys [H, T, D], W <= T -> [H, T] float32.

    Query w stands at T - W + w and sees the keys up to its own. Softmax weights, summed over the queries; one number for the G
    query heads.
    """
    heads, group, width, _ = queries.shape
    tokens = keys.shape[1]
    place = torch.arange(tokens, device=keys.device)
    total = torch.zeros((heads, group, tokens), device=keys.device)
    keys, step = keys.float().transpose(1, 2), max(1, _SCORES // (heads * group * tokens))
    for at in range(0, width, step):
        some = queries[:, :, at : at + step]
        scores = (some.float().flatten(1, 2) @ keys).view(heads, group, -1, tokens) * scale
        stands = tokens - width + at + torch.arange(some.shape[2], device=keys.device)
        total += torch.softmax(scores.masked_fill(place > stands[:, None], -torch.inf), dim=3).sum(dim=2)
    return total.mean(dim=1) if agree == "mean" else total.amax(dim=1)


class KeptIndex:
    """At most as many rows as select() may bring, each with a score; of those that come, the best stay.

    kept [B, H, M] int32: positions, -1 padded; scores [B, H, M] float32; keys [B, H, M, D] where with_keys. What is not kept is not
    selected again, though the store has it, until a dense pass gives the lane more tokens: that is a prompt, and chooses anew from
    all of them. Before the number of rows is known (by the layer's shape, or the first select()) everything is kept.
    """

    graph_safe = True
    grows = False
    on_host = False
    evicts = True
    """What it does not keep is not read again."""

    def __init__(self, shape: LayerShape, *, agree: Agree, with_keys: bool = False) -> None:
        if agree not in get_args(Agree):
            raise ConfigError(f"agree is {agree!r}; it must be one of {', '.join(get_args(Agree))}")
        self.shape, self.agree = shape, agree
        self.first, self.rows = shape.regions.sink, shape.rows
        size, device = (0, shape.kv_heads, shape.rows), shape.device
        self.tables = {
            "kept": torch.full(size, -1, dtype=torch.int32, device=device),
            "scores": torch.zeros(size, dtype=torch.float32, device=device),
        }
        if with_keys:
            self.tables["keys"] = torch.zeros((*size, shape.head_dim), dtype=shape.dtype, device=device)
        self.tokens: list[int] = []  # that a lane was given

    # What a method adds

    def watch(self, lane: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """The scores of a prompt's first `tokens` tokens after the sink, [H, tokens] float32. keys [H, T, D]: theirs, then those of
        the tokens behind, in the window; queries [H, G, W, D]: of the last W of all T."""
        raise NotImplementedError

    def arrive(self, lane: int, start: int, stop: int) -> Tensor:
        """The scores of the tokens start .. stop, which leave the ring, [H, stop - start] float32."""
        raise NotImplementedError

    def rank(self, lane: int, rows: Tensor, scores: Tensor) -> Tensor:
        """What decides who stays, [H, N]; of rows [H, N] and their scores."""
        return scores

    # Index

    def make_room(self, lanes: int, tokens: int) -> None:
        """See Index."""
        self.reserve(lanes)

    def build(self, lane: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index. Without tokens behind these in the store it is no prompt: the first that leave the ring."""
        self.truncate(lane, 0)
        self.first = first
        self.reserve(lane + 1)
        self._take(lane, keys, queries)

    def append(self, lanes: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index. With queries it is a dense pass."""
        self.reserve(max(lanes) + 1)
        for i, lane in enumerate(lanes):
            self._take(lane, keys[i], None if queries is None else queries[i])

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        batch = query.shape[0]
        self.reserve(batch)
        if budget != self.tables["kept"].shape[2]:
            self.resize(budget)
        rows = self.tables["kept"][:batch].clone()
        return Selection(rows, (rows >= 0).sum(dim=2, dtype=torch.int32))

    def truncate(self, lane: int, length: int) -> None:
        """See Index."""
        if lane < len(self.tokens):
            self.tokens[lane] = min(self.tokens[lane], max(0, length - self.first))
            own = self._own(lane)
            self._fill(lane, own | {"kept": own["kept"].masked_fill(own["kept"] >= length, -1)})

    def reorder(self, lanes: Sequence[int]) -> None:
        """See Index."""
        self.reserve(max(lanes) + 1)
        which = torch.tensor(lanes, device=self.shape.device)
        self.tables = {name: table.index_select(0, which) for name, table in self.tables.items()}
        self.tokens = [self.tokens[lane] for lane in lanes]

    def state_dict(self) -> dict[str, Any]:
        """See Index."""
        tables = {name: table.clone() for name, table in self.tables.items()}
        return {"tables": tables, "tokens": list(self.tokens), "first": self.first, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Index."""
        self.tables = {name: table.to(self.shape.device, copy=True) for name, table in state["tables"].items()}
        self.tokens, self.first, self.rows = list(state["tokens"]), int(state["first"]), int(state["rows"])

    # Inside

    def reserve(self, lanes: int) -> None:
        """Room for so many lanes."""
        have = self.tables["kept"].shape[0]
        if lanes > have:
            self.tables = {name: grown(table, lanes) for name, table in self.tables.items()}
            self.tables["kept"][have:] = -1
            self.tokens += [0] * (lanes - len(self.tokens))

    def resize(self, rows: int) -> None:
        """Keep so many from now on: of more, the best."""
        lanes = [self._own(lane) for lane in range(len(self.tokens))]
        self.rows = rows
        for name in ("kept", "scores", "keys"):
            if name in self.tables:
                old = self.tables[name]
                self.tables[name] = old.new_zeros((old.shape[0], old.shape[1], rows, *old.shape[3:]))
        for lane, own in enumerate(lanes):
            self._fill(lane, own)

    def anew(self, lane: int, queries: Tensor, behind: Tensor) -> None:
        """Choose from all tokens that the lane was given. queries [Hq, W, D]; behind [H, n, D]: keys of the tokens after them."""
        start, stop = self.first, self.first + self.tokens[lane]
        keys = torch.cat((stream_keys(self.shape.store, lane, start, stop, self.shape.device), behind), dim=1)
        watching = queries[:, -keys.shape[1] :].unflatten(0, (self.shape.kv_heads, -1))
        scores = self.watch(lane, watching, keys, stop - start)
        self._fill(lane, self._new(start, stop, scores, keys))

    def _take(self, lane: int, keys: Tensor, queries: Tensor | None) -> None:
        """The next tokens of a lane, keys [H, n, D]."""
        start = self.first + self.tokens[lane]
        stop = start + keys.shape[1]
        self.tokens[lane] += keys.shape[1]
        end = self.shape.store.length(lane) if lane < self.shape.store.lanes else 0
        if queries is not None and end > stop:
            self.anew(lane, queries, stream_keys(self.shape.store, lane, stop, end, self.shape.device))
            return
        new = self._new(start, stop, self.arrive(lane, start, stop), keys)
        self._fill(lane, {name: torch.cat((table, new[name]), dim=1) for name, table in self._own(lane).items()})

    def _new(self, start: int, stop: int, scores: Tensor, keys: Tensor) -> dict[str, Tensor]:
        rows = torch.arange(start, stop, dtype=torch.int32, device=keys.device).expand(keys.shape[0], -1)
        return {"kept": rows, "scores": scores, "keys": keys[:, : stop - start]}

    def _own(self, lane: int) -> dict[str, Tensor]:
        return {name: self.tables[name][lane] for name in ("kept", "scores", "keys") if name in self.tables}

    def _fill(self, lane: int, some: dict[str, Tensor]) -> None:
        """Keep the best of some rows: those that are none (-1) come last, of equal ones the earlier."""
        rows = some["kept"]
        if not self.rows and rows.shape[1] > self.tables["kept"].shape[2]:
            for name in self._own(lane):
                self.tables[name] = grown(self.tables[name], 0, rows.shape[1])
            self.tables["kept"][:lane, :, -1] = self.tables["kept"][lane + 1 :, :, -1] = -1
        rank = self.rank(lane, rows, some["scores"]).masked_fill(rows < 0, -torch.inf)
        limit = self.tables["kept"].shape[2]
        order = torch.sort(rank, dim=1, descending=True, stable=True).indices[:, :limit]
        n = order.shape[1]
        for name in self._own(lane):
            index = order if name != "keys" else order[..., None].expand(-1, -1, self.shape.head_dim)
            self.tables[name][lane, :, :n] = some[name].gather(1, index)
        self.tables["kept"][lane, :, n:] = -1


class SnapIndex(KeptIndex):
    """SnapKV: the tokens that the prompt's last queries attend to, and their neighbours.

    The scores of `observed` over an observation window of the prompt's last `width` tokens (no more than the window), pooled over
    `kernel` neighbours. Tokens that leave the ring later stay while there is room.
    """

    def __init__(
        self, shape: LayerShape, *, width: int = 32, kernel: int = 7, pooling: Pooling = "avg", agree: Agree = "mean"
    ) -> None:
        if pooling not in get_args(Pooling):
            raise ConfigError(f"pooling is {pooling!r}; it must be one of {', '.join(get_args(Pooling))}")
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}; it must be odd and at least 1")
        if width < 1:
            raise ConfigError(f"width is {width}; it must be at least 1")
        super().__init__(shape, agree=agree)
        self.width, self.kernel, self.pooling = min(width, shape.regions.window), kernel, pooling

    def watch(self, lane: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """See KeptIndex."""
        mass = observed(queries[:, :, -self.width :], keys, scale=self.shape.scale, agree=self.agree)[:, :tokens]
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(mass, self.kernel, stride=1, padding=self.kernel // 2)

    def arrive(self, lane: int, start: int, stop: int) -> Tensor:
        """See KeptIndex. Less than any token of the prompt has."""
        return torch.full((self.shape.kv_heads, stop - start), -1.0, device=self.shape.device)


class FreshSnapIndex(SnapIndex):
    """SnapKV's choice made anew every `interval` tokens, by the last queries, from all tokens.

    The window's keys are on the device already; the others come from the host for it, between two steps.
    """

    evicts = False

    def __init__(self, shape: LayerShape, *, interval: int = 128, **options: Any) -> None:
        if interval < 1:
            raise ConfigError(f"interval is {interval}; it must be at least 1")
        super().__init__(shape, **options)
        self.interval = interval
        self.tables["recent"] = torch.zeros(
            (0, shape.q_heads, self.width, shape.head_dim), dtype=shape.dtype, device=shape.device
        )
        self.cursor = torch.zeros(1, dtype=torch.int64, device=shape.device)  # counts steps; a captured one counts on
        self.since: list[int] = []

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        selection = super().select(query, budget)
        slot = self.cursor % self.width
        self.tables["recent"][: query.shape[0]].index_copy_(2, slot, query[:, :, None].to(self.shape.dtype))
        self.cursor.add_(1)
        return selection

    def watch(self, lane: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """See KeptIndex."""
        self.since[lane] = 0
        last = queries.flatten(0, 1)[:, -self.width :]
        slots = (self.cursor + torch.arange(-last.shape[1], 0, device=keys.device)) % self.width
        self.tables["recent"][lane].index_copy_(1, slots, last.to(self.shape.dtype))
        return super().watch(lane, queries, keys, tokens)

    def append(self, lanes: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index."""
        super().append(lanes, keys, values, queries)
        slab, n = self.shape.slab, keys.shape[2]
        for lane in lanes:
            self.since[lane] += n
            if queries is None and self.since[lane] >= self.interval and slab is not None:
                stop = self.first + self.tokens[lane]
                behind = slab.read(lane, stop, stop - n + self.shape.regions.ring)[:, :, 0]  # the ring is full
                order = (self.cursor + torch.arange(self.width, device=self.cursor.device)) % self.width
                self.anew(lane, self.tables["recent"][lane].index_select(1, order), behind)

    def reserve(self, lanes: int) -> None:
        """See KeptIndex."""
        super().reserve(lanes)
        self.since += [0] * (lanes - len(self.since))

    def reorder(self, lanes: Sequence[int]) -> None:
        """See Index."""
        super().reorder(lanes)
        self.since = [self.since[lane] for lane in lanes]

    def state_dict(self) -> dict[str, Any]:
        """See Index."""
        return super().state_dict() | {"cursor": self.cursor.clone(), "since": list(self.since)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Index."""
        super().load_state_dict(state)
        self.cursor, self.since = state["cursor"].to(self.shape.device, copy=True), list(state["since"])


_PROMPT = 64  # queries of a prompt that count for H2O


class HeavyIndex(KeptIndex):
    """H2O: of all tokens half are the most recent ones, half those that were attended to most, over all steps so far.

    Each step's softmax over sink, ring and kept tokens adds to their scores as soon as its own key is in the ring: with the next
    step, or before tokens leave. A prompt's scores begin with the attention of its last 64 queries.
    Sink and ring count as recent; what half the budget leaves beside them goes to the latest of the kept tokens.
    """

    def __init__(self, shape: LayerShape, *, agree: Agree = "mean") -> None:
        super().__init__(shape, agree=agree, with_keys=True)
        device = shape.device
        self.tables |= {
            "near": torch.zeros((0, shape.kv_heads, shape.regions.held + 1), device=device),  # the last place is for nothing
            "asked": torch.zeros((0, shape.q_heads, shape.head_dim), dtype=shape.dtype, device=device),  # a query not added yet
            "length": torch.zeros(0, dtype=torch.int64, device=device),  # tokens up to its own; 0: there is none
            "ends": torch.zeros(0, dtype=torch.int64, device=device),  # where the ring begins
        }

    def watch(self, lane: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """See KeptIndex."""
        mass = observed(queries[:, :, -_PROMPT:], keys, scale=self.shape.scale, agree=self.agree)
        positions = torch.arange(self.first + tokens, self.first + keys.shape[1], device=keys.device)
        self.tables["near"][lane].zero_()
        self.tables["near"][lane, :, self._place(positions)] = mass[:, tokens:]
        return mass[:, :tokens]

    def arrive(self, lane: int, start: int, stop: int) -> Tensor:
        """See KeptIndex."""
        return self.tables["near"][lane, :, self._place(torch.arange(start, stop, device=self.shape.device))]

    def rank(self, lane: int, rows: Tensor, scores: Tensor) -> Tensor:
        """See KeptIndex."""
        held = self.shape.regions.held
        recent = max(0, ((self.rows or rows.shape[1]) + held) // 2 - held)
        return scores.masked_fill(rows >= self.first + self.tokens[lane] - recent, torch.inf)

    def build(self, lane: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index."""
        self.add()
        super().build(lane, first, keys, values, queries)
        self.tables["ends"][lane].fill_(first + self.tokens[lane])

    def append(self, lanes: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index."""
        self.add()
        super().append(lanes, keys, values, queries)
        for lane in lanes:
            self.tables["ends"][lane].fill_(self.first + self.tokens[lane])

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        selection = super().select(query, budget)
        if self.shape.clock is not None:
            batch, length = query.shape[0], self.tables["length"]
            self.add()
            self.tables["asked"][:batch] = query
            length[:batch] = self.shape.clock.length
        return selection

    def truncate(self, lane: int, length: int) -> None:
        """See Index. Tokens that return to the ring begin anew."""
        super().truncate(lane, length)
        if lane < len(self.tokens):
            self.tables["near"][lane].zero_()
            self.tables["length"][lane].zero_()
            self.tables["ends"][lane].fill_(self.first + self.tokens[lane])

    def add(self) -> None:
        """Add what the last queries paid to each token, and forget them. Device work of fixed shape."""
        slab = self.shape.slab
        if slab is None or not self.tokens:
            return
        lanes, places = min(slab.data.shape[0], len(self.tokens)), self.shape.regions.held
        tables = {name: table[:lanes] for name, table in self.tables.items()}
        near, length, end = tables["near"], tables["length"], torch.clamp(tables["ends"], min=self.first)
        newest = torch.where(length > 0, self._place(length - 1), places)[:, None, None]
        near.scatter_(2, newest.expand(-1, near.shape[1], 1), 0.0)  # another token stood there before
        place, sink, ring = torch.arange(places, device=near.device), self.shape.regions.sink, self.shape.regions.ring
        since = (place - end[:, None]) % ring  # place - sink is position - sink modulo ring, so this is position - end
        held = torch.where(place < sink, place < length[:, None], since < (length - end)[:, None])[:, None, None]
        kept = (tables["kept"] >= 0) & (length > 0)[:, None, None]
        known = torch.cat((held.expand(-1, near.shape[1], -1, -1), kept[:, :, None]), dim=3)
        keys = torch.cat((slab.keys[:lanes, :, :places], tables["keys"]), dim=2).float()
        logits = tables["asked"].float().unflatten(1, (near.shape[1], -1)) @ keys.transpose(2, 3) * self.shape.scale
        weights = torch.softmax(logits.masked_fill(~known, -torch.inf), dim=3).masked_fill(~known, 0.0)
        paid = weights.mean(dim=2) if self.agree == "mean" else weights.amax(dim=2)
        near[:, :, :places] += paid[:, :, :places]
        tables["scores"] += paid[:, :, places:]
        length.zero_()

    def _place(self, position: Tensor) -> Tensor:
        sink, ring = self.shape.regions.sink, self.shape.regions.ring
        return torch.where(position < sink, position, sink + (position - sink) % ring)
