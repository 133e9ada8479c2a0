"""IceCache's index of a layer: a DCI-tree for every sequence and KV head, in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Traits
from kvthaw.errors import CacheError, ConfigError, at_least
from kvthaw.index.joined import joined_or_all
from kvthaw.index.tree_config import CHOICES, TreeConfig, directions
from kvthaw.native import ELEMENTS, Effort, Forest, Isa, TreeSettings, isa_code

_STATE = {
    "radius2": torch.float64,
    "pages": torch.int32,
    "page_node": torch.int32,
    "page_count": torch.int32,
    "members": torch.int32,
}
"""Tensors of saved trees, in the order in which the extension takes them."""


class TreeIndex(Index, tested=True):
    """The DCI-trees of a layer, behind the Index protocol.

    Keys are read from the layer's host store, by position, and never copied: rows must be readable in the store before
    build() or append(). Copies of a sequence made by reorder() share its trees until one of them changes.

    threads: most threads of a call, including the caller's; 0: one for each core.
    isa: the instruction set, None for the best; for tests.
    """

    traits = Traits(grows=False, on_host=True, snapshots=True)

    def __init__(
        self, context: IndexContext, config: TreeConfig | None = None, *, threads: int = 0, isa: Isa | None = None
    ) -> None:
        self.context, self.threads = context, threads
        self.config = config or TreeConfig(seed=context.seed)
        element = context.store.format.element
        if element not in ELEMENTS:
            raise ConfigError(f"dtype is {element}; a DCI-tree reads {', '.join(str(d) for d in ELEMENTS)}")
        c = self.config
        units = torch.stack([directions(c, context.layer, h, context.head_dim) for h in context.heads]).contiguous()
        self.forest = Forest(
            _settings(c, context, ELEMENTS[element]),
            seqs=context.store.seqs,
            heads=context.kv_heads,
            block_size=context.store.block_size,
            directions=units.data_ptr(),
            isa=isa_code(isa),
        )

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor | None = None, queries: Tensor | None = None) -> None:
        """Index a sequence from scratch: positions first .. first + T, T from keys [H, T, D], whose numbers come from the store.

        Raises ValueError if a key is not finite, without changing the sequence, and CacheError if the store lacks a row.
        """
        points = keys.shape[1]
        bases = self._addresses(seq, seq + 1, {seq: first + points})
        self.forest.build(seq, first, points, bases.data_ptr(), self.threads)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor | None = None, queries: Tensor | None = None) -> None:
        """Insert the next n positions of some sequences, n from keys [R, H, n, D]. A sequence that was never built begins after the
        sink. Raises as build() does, with nothing changed."""
        seqs, points = list(seqs), keys.shape[2]
        if len(set(seqs)) != len(seqs):
            raise CacheError(f"append to sequences {seqs}: a sequence stands there twice")
        if not seqs or not points:
            return
        for seq in seqs:
            if not self.forest.has(seq):
                self.forest.build(seq, self.context.regions.sink, 0, 0, 1)
        bases = self._addresses(0, max(seqs) + 1, {seq: self.length(seq) + points for seq in seqs})[seqs]
        self.forest.append(seqs, points, bases.data_ptr(), bases.shape[1], self.threads)

    def select(self, query: Tensor, budget: int) -> Selection:
        """At most `budget` rows a KV head: query [B, Hq, D], on any device; rows [B, H, budget] and counts come back there.

        A sequence that holds no more than the budget is selected whole, without a search."""
        heads, here = (len(query), self.context.kv_heads), query.to(device="cpu", dtype=torch.float32).contiguous()
        rows, counts = (torch.empty(size, dtype=torch.int32) for size in ((*heads, max(0, budget)), heads))
        TreeIndex.prepare(self, here, budget, rows, counts)()  # a subclass may prepare by this select()
        return Selection(rows.to(query.device), counts.to(query.device))

    def prepare(self, query: Tensor, budget: int, rows: Tensor, counts: Tensor) -> Callable[[], None]:
        """See Index."""
        batch, q_heads, dim = query.shape
        if (q_heads, dim) != (self.context.q_heads, self.context.head_dim) or batch > self.context.store.seqs:
            most = [self.context.store.seqs, self.context.q_heads, self.context.head_dim]
            raise ValueError(f"query is {list(query.shape)}; it must be {most}, or fewer sequences")
        at_least(0, budget=budget)
        search = self._search_each if self.config.merge == "each" else self._search
        return search(query, rows, counts, budget)

    def _search(self, query: Tensor, rows: Tensor, counts: Tensor, budget: int) -> Callable[[], None]:
        """Return what prepare() does with a query [B, Hq, D] that was checked."""
        batch, group = query.shape[0], query.shape[1] // self.context.kv_heads

        def select() -> None:
            bases = self._addresses(0, batch, {seq: self.length(seq) for seq in range(batch) if self.forest.size(seq)})
            addresses = bases.data_ptr(), bases.shape[1], rows.data_ptr(), counts.data_ptr()
            self.forest.select(batch, group, query.data_ptr(), budget, *addresses, self.threads)

        return select

    def _search_each(self, query: Tensor, rows: Tensor, counts: Tensor, budget: int) -> Callable[[], None]:
        """Search as _search() does. Each of G query heads finds budget / G rows, and all of them attend to the union."""
        batch, heads, group = query.shape[0], self.context.kv_heads, self.context.group
        share = max(1, budget // group)
        own = torch.empty((group, batch, heads, query.shape[2]), dtype=torch.float32)
        found = torch.empty((group, batch, heads, share), dtype=torch.int32)
        held = torch.empty((group, batch, heads), dtype=torch.int32)
        searches = [self._search(*each, share) for each in zip(own, found, held, strict=True)]

        def select() -> None:
            own.copy_(query.unflatten(1, (heads, group)).movedim(2, 0))
            for search in searches:
                search()
            sizes = torch.tensor([self.forest.size(seq) for seq in range(batch)], dtype=torch.int32)
            firsts = torch.tensor([[self.forest.first(seq)] for seq in range(batch)], dtype=torch.int32)
            chosen, number, _ = joined_or_all(found.movedim(0, 2).contiguous(), budget, firsts, sizes)
            rows.copy_(chosen)
            counts.copy_(number)

        return select

    def truncate(self, seq: int, length: int) -> None:
        """Forget positions >= length; 0 clears the sequence. The store must still hold the positions that stay."""
        if length < self.length(seq):
            bases = self._addresses(seq, seq + 1, {seq: length})
            self.forest.truncate(seq, length, bases.data_ptr())

    def reorder(self, seqs: Sequence[int]) -> None:
        """Sequence i becomes what sequence seqs[i] was. Trees are shared, and copied when one of their sequences changes."""
        self.forest.reorder(list(seqs))

    def clone_from(self, other: Self) -> None:
        """See Index. Trees are shared, and copied when one of their sequences changes."""
        self.forest = other.forest.copy()

    def export(self, seq: int) -> Forest | None:
        """See Tables. Trees are shared, and copied when the sequence changes."""
        if not self.forest.has(seq):
            return None
        forest = self.forest.copy()
        forest.reorder([seq])
        return forest

    def state(self, held: Any) -> Mapping[str, Tensor]:
        """See Index: of each head's tree its radius and its pages, a page being a node and the keys in it. What else a tree has
        follows from the keys. 4 bytes a key and head, and 8 a page."""
        if isinstance(held, Mapping):
            return held
        heads = range(self.context.kv_heads)
        pages = torch.tensor([held.pages(0, head) for head in heads], dtype=torch.int32)
        sizes = {"radius2": [len(pages)], "page_node": [int(pages.sum())], "page_count": [int(pages.sum())]}
        sizes |= {"members": [len(pages), held.size(0)]}
        state = {name: torch.empty(size, dtype=_STATE[name]) for name, size in sizes.items()}
        begins = (pages.cumsum(0) - pages).tolist()
        for head in heads:
            at = {"radius2": head, "page_node": begins[head], "page_count": begins[head], "members": head}
            held.save(0, head, *(tensor[at[name] :].data_ptr() for name, tensor in state.items()))
        return state | {"pages": pages}

    def load(self, seq: int, held: Forest | Mapping[str, Tensor] | None, end: int) -> None:
        if held is None:
            return
        if not isinstance(held, Mapping):
            self.forest.share(seq, held, 0)
            self.truncate(seq, end)
            return
        found = {name: held.get(name, torch.empty(0)).contiguous() for name in _STATE}
        heads, members, first = self.context.kv_heads, found["members"], self.context.regions.sink
        points, pages = members.numel() // heads, int(found["pages"].sum())
        sizes = {"radius2": [heads], "pages": [heads], "page_node": [pages], "page_count": [pages], "members": [heads, points]}
        for name, dtype in _STATE.items():
            if (found[name].dtype, list(found[name].shape)) != (dtype, sizes[name]) or bool((found["pages"] < 0).any()):
                raise CacheError(f"layer {self.context.layer}: {name} is not of a saved tree of {heads} heads")
        kept = max(0, min(points, end - first))
        bases = self._addresses(seq, seq + 1, {seq: first + kept})
        try:
            self.forest.restore(
                seq, first, points, kept, bases.data_ptr(), self.threads, *(found[name].data_ptr() for name in _STATE)
            )
        except ValueError as error:
            raise CacheError(str(error)) from error

    def tensors(self) -> list[Tensor]:
        """See Index: none, for trees are searched on the CPU."""
        return []

    def length(self, seq: int) -> int:
        """Where a sequence's positions end: it holds [first, length)."""
        return self.forest.first(seq) + self.forest.size(seq)

    def nbytes(self) -> int:
        """Bytes of host memory that the trees hold, shared ones once."""
        return self.forest.nbytes()

    def _addresses(self, start: int, stop: int, lengths: dict[int, int]) -> Tensor:
        """Return the store's current block table of sequences start .. stop, [stop - start, blocks] int64.

        lengths: rows that the store must hold, by sequence.

        Raises CacheError if the store holds fewer.
        """
        store = self.context.store
        for seq, length in lengths.items():
            held = store.length(seq) if seq < store.seqs else 0
            if held < length:
                raise CacheError(f"sequence {seq} is to be indexed to position {length}, but the store holds {held} rows")
        table, missing = store.table.on_cpu(), stop - store.seqs
        if start == missing == 0:
            return table
        return (torch.nn.functional.pad(table, (0, 0, 0, missing)) if missing > 0 else table)[start:stop]


def _settings(config: TreeConfig, context: IndexContext, dtype: int) -> TreeSettings:
    """Return what the trees of a layer have in common, as the extension takes it."""
    found, batch = TreeSettings(), config.retrieve_batch
    found.dim, found.layer, found.dtype, found.scale = context.head_dim, context.layer, dtype, context.scale
    found.first_head = context.heads[0]
    found.page_size, found.composites, found.simples = config.page_size, config.composites, config.simples
    found.promote, found.promote_higher = config.ratios
    found.in_order, found.seed = config.promotion == "in_order", config.seed
    found.query = Effort(keep=config.query_beam, retrieve=config.query_retrieve_share, batch=batch)
    found.insert = Effort(keep=config.insert_beam, retrieve=config.insert_retrieve_share, batch=batch)
    found.build = Effort(keep=config.build_beam, retrieve=config.build_retrieve_share, batch=batch)
    found.query_beam_share = config.query_beam_share
    found.unit, found.descend = CHOICES["unit"].index(config.unit), CHOICES["descend"].index(config.descend)
    found.merge, found.strict = int(config.merge == "share"), config.answers == "best"
    found.outliers, found.spread = config.outliers, config.spread
    return found
