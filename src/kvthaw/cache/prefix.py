"""Prefix reuse: KV of earlier prompts, kept by token ids, for prompts that begin alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host_memory import Block, available_host_memory
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.index_updater import Snapshot
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.prefix_tree import Node, PrefixTree, common
from kvthaw.cache.resume import LayerShape, copied, resume
from kvthaw.cache.step import Step
from kvthaw.cache.window import WindowLayer
from kvthaw.errors import CacheError, HostMemoryError, at_least
from kvthaw.formatting import read_bytes
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
_SHARE = 4  # the part of free host memory that is taken where no limit is given


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """queries, hits: tokens of the prompts that were looked up, and those of them that did not go through the model again.
    kept_tokens, kept_bytes: what is kept now. evicted_tokens: dropped so far. names: entries that stay. refused: why prompts are
    prefilled whole, None where they need not be."""

    queries: int = 0
    hits: int = 0
    kept_tokens: int = 0
    kept_bytes: int = 0
    evicted_tokens: int = 0
    names: Sequence[str] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt that is kept under a name: its tokens [T], its last node, its salt."""

    ids: Tensor
    node: Node
    salt: str


@dataclass(frozen=True, slots=True)
class Indexes:
    """What indexes of the layers held of a prompt [T], by number; kind: of which caches."""

    ids: Tensor
    salt: str
    kind: tuple[object, ...]
    layers: Mapping[int, Snapshot]

    def upto(self, tokens: int) -> dict[int, Snapshot]:
        """Return what of them holds for a prompt that begins with so many of the tokens."""
        return {number: replace(one, end=min(one.end, tokens)) for number, one in self.layers.items()}

    @property
    def saved(self) -> bool:
        """Whether they are tensors that were read from somewhere, of which every sequence makes its own."""
        return any(isinstance(one.index, Mapping) for one in self.layers.values())

    def nbytes(self) -> int:
        """Bytes of host memory, those shared with a sequence included."""
        return sum(one.nbytes() for one in self.layers.values())


class PrefixCache:
    """Keeps the KV of prompts, so that a prompt that begins like one of them prefills only what is new.

    Blocks of KV are shared copy-on-write with the sequences that they come from and go to; they outlive both. Only tokens that were
    prefilled densely are kept, not those decoded under a method, and an index is rebuilt from the rows: a prompt gets the KV and
    the index of a fresh prefill in chunks that end at the same tokens. Only IceCache's trees, which take longer to build than the
    prefill, are shared: where a prompt has few new tokens, they are inserted, as those of a next turn are. At least the last 128
    tokens of a prompt always go through the model, for indexes that read its last queries.

    One model's KV of one block_size and kv_dtype can be kept, of caches under any methods that drop no tokens. Prompts of different
    salts share nothing.

    host_bytes: most bytes of blocks, wherever they lie, and of trees, or text such as "8GiB"; None: a quarter of the free host
    memory. The least recently used blocks are dropped first, and earlier where a cache has no other memory for a request. Entries
    with a name stay.
    """

    def __init__(self, *, host_bytes: int | str | None = None) -> None:
        check_type(int | str | None, host_bytes=host_bytes)
        self.host_bytes = None if host_bytes is None else read_bytes(host_bytes, "host_bytes")
        at_least(0, host_bytes=self.host_bytes)
        self.refused: str | None = None
        self._tree: PrefixTree | None = None
        self._entries: dict[str, Entry] = {}
        self._blocks: dict[int, dict[Node, Block]] = {}  # by layer
        self._shapes: dict[int, LayerShape] = {}
        self._indexes: list[Indexes] = []  # the least recently used first
        self._kind: tuple[object, ...] = ()
        self._node_bytes = 0
        self._queries = self._hits = self._evicted = 0

    def fill(self, kv: KVCache, ids: Tensor, *, seq: int | None = None, salt: str = "") -> int:
        """Begin a prompt [T] with what is kept of it. Returns how many of its tokens need not go through the model.

        The sequence has no tokens yet; seq: its place in a running batch, None for a cache of one sequence."""
        self.refused, ids = _refusal(kv), ids.cpu()
        self._queries += len(ids)
        if self.refused is not None or self._tree is None:
            return 0
        self._check(kv)
        path, tokens = self._tree.match(ids, salt)
        tokens = kv.settings.ranks.least(min(tokens, len(ids) - RECENT_QUERIES))  # processes evict each for itself
        if tokens <= 0:
            return 0
        path = path[: -(-tokens // self._tree.block_size)]
        self._tree.touch(path[-1])
        rows = {number: [blocks[node] for node in path] for number, blocks in self._blocks.items()}
        best = self._index(kv, ids, salt)
        known = {} if best is None else best.upto(common(best.ids, ids))

        def take(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
            number = layer.number
            kept = {seq or 0: known[number]} if number in known else {}
            resume(layer, step, self._shapes[number], {seq or 0: rows[number]}, kept=kept)

        with kv.sequences.prompt(len(ids), seq):
            kv.append_stored_prompt(tokens, None, take)
        kv.sequences.cached_tokens += tokens
        self._hits += tokens
        return tokens

    def keep(self, kv: KVCache, ids: Tensor, *, seq: int = 0, salt: str = "", name: str | None = None) -> None:
        """Keep the first tokens of a sequence, ids [T], all of them of its prompt. name: keep them until forget(name).

        They have arrived on the host (`KVCache.wait`). Raises CacheError where they cannot be kept under a name."""
        self.refused, ids, node = _refusal(kv), ids.cpu(), None
        if self.refused is None and len(ids):
            layers = [layer for layer in kv.layers if not isinstance(layer, WindowLayer)]
            tree = self._open(kv, {layer.number: LayerShape.of(layer, seq, kv.settings.kv_dtype) for layer in layers})
            try:
                for number, (each, new) in enumerate(tree.insert(ids, salt)):
                    if new:
                        self._share(kv, seq, number, each)
                    node = each
            except HostMemoryError as error:
                _log.warning("a prompt is kept in part: %s", error)
            for other in () if node is None else tree.covered(node):
                self._drop(other)
            found = self._index(kv, ids, salt)
            if found is None or found.saved or (name is not None and len(found.ids) != len(ids)):
                self._indexes = [one for one in self._indexes if one is not found or not one.saved]
                updaters = {layer.number: layer.storage.updater for layer in kv.offloaded}
                every = {number: updater.snapshot(seq) for number, updater in updaters.items() if updater is not None}
                held = {number: each for number, each in every.items() if each is not None}
                self._indexes += [Indexes(ids, salt, _index_kind(kv), held)] if held else []
        self._trim()
        if name is not None:
            self.name(name, ids, salt)

    def name(self, name: str, ids: Tensor, salt: str = "") -> None:
        """Let a prompt [T] that is kept stay until forget(name). Raises CacheError where not all of it is kept, or host_bytes does
        not allow it."""
        path, tokens = ([], 0) if self._tree is None else self._tree.match(ids, salt)
        if self._tree is None or tokens < len(ids):
            raise CacheError(f"{name!r} cannot be kept: {self.refused or f'{tokens} of its {len(ids)} tokens are in memory'}")
        self._tree.pin(path[-1], 1)
        if self.pinned_bytes > (self.host_bytes or 0):
            self._tree.pin(path[-1], -1)
            raise CacheError(f"{name!r} cannot be kept: host_bytes is {self.host_bytes:,}, too little for all entries")
        if name in self._entries:
            self.forget(name)
        self._entries[name] = Entry(ids, path[-1], salt)

    @property
    def entries(self) -> dict[str, Entry]:
        """What is kept under names. May be read on any thread."""
        return dict(self._entries)

    def entry(self, name: str) -> Entry:
        """Return what is kept under a name. Raises CacheError where there is nothing."""
        if name not in self._entries:
            raise CacheError(f"no prompt is kept as {name!r}")
        return self._entries[name]

    def rows(self, name: str) -> Iterator[tuple[int, LayerShape, Tensor]]:
        """Yield the stored rows [H, T, *tail] of an entry on the host, with the number and the shape of each layer."""
        entry = self.entry(name)
        assert self._tree is not None
        path, tokens = self._tree.match(entry.ids, entry.salt)
        for number, blocks in self._blocks.items():
            yield (
                number,
                self._shapes[number],
                torch.cat([blocks[node].data.cpu() for node in path], dim=1)[:, :tokens].contiguous(),
            )

    def snapshots(self, kv: KVCache, name: str) -> Mapping[int, Snapshot]:
        """Return what indexes of an entry's tokens, no more, are kept of such a cache, by layer."""
        entry, kind = self.entry(name), _index_kind(kv)
        mine = [one for one in self._indexes if (one.kind, one.salt) == (kind, entry.salt) and torch.equal(one.ids, entry.ids)]
        return mine[-1].layers if mine else {}

    def restore(
        self,
        kv: KVCache,
        name: str,
        ids: Tensor,
        layers: Mapping[int, tuple[LayerShape, Sequence[Block]]],
        *,
        salt: str = "",
        indexes: Mapping[int, Snapshot] = MappingProxyType({}),
    ) -> None:
        """Keep a prompt [T] under a name whose blocks were read from somewhere, for caches such as this one. indexes: of its
        layers, where they came too. Raises CacheError where they cannot be kept."""
        self.refused = _refusal(kv)
        if self.refused is None:
            tree = self._open(kv, {number: shape for number, (shape, _) in layers.items()})
            for at, (node, new) in enumerate(tree.insert(ids, salt)):
                for number, (_, blocks) in layers.items() if new else ():
                    self._blocks[number][node] = blocks[at]
                    blocks[at].owners += 1
            self._indexes += [Indexes(ids, salt, _index_kind(kv), indexes)] if indexes else []
        self._trim()
        self.name(name, ids, salt)

    def forget(self, name: str) -> None:
        """Let an entry be dropped like what has no name. Raises CacheError where there is none."""
        entry = self.entry(name)
        assert self._tree is not None
        del self._entries[name]
        self._tree.pin(entry.node, -1)

    def clear(self) -> None:
        """Drop everything, entries with a name included; for a model whose weights have changed."""
        for name in list(self._entries):
            self.forget(name)
        self._indexes.clear()
        while self.drop_oldest():
            pass

    def drop_oldest(self) -> bool:
        """Drop the least recently used block of tokens in every layer. Returns whether there was one."""
        node = None if self._tree is None else self._tree.oldest()
        if node is None:
            return False
        self._evicted += len(node.tokens)
        self._drop(node)
        return True

    @property
    def kept_bytes(self) -> int:
        """Bytes of all blocks and indexes that are kept."""
        nodes = 0 if self._tree is None else len(self._tree.nodes)
        return nodes * self._node_bytes + sum(one.nbytes() for one in self._indexes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that entries with a name hold."""
        return 0 if self._tree is None else self._node_bytes * self._tree.pinned

    def pinned_blocks(self) -> tuple[int, dict[int, int]]:
        """Return how many blocks of a layer entries with a name hold, and their bytes by layer."""
        sizes = {number: shape.block_bytes(self._tree.block_size) for number, shape in self._shapes.items() if self._tree}
        return 0 if self._tree is None else self._tree.pinned, sizes

    def stats(self) -> PrefixStats:
        """What is kept, and what was looked up so far."""
        nodes = [] if self._tree is None else list(self._tree.nodes)
        return PrefixStats(
            queries=self._queries,
            hits=self._hits,
            kept_tokens=sum(len(node.tokens) for node in nodes),
            kept_bytes=self.kept_bytes,
            evicted_tokens=self._evicted,
            names=sorted(self._entries),
            refused=self.refused,
        )

    # Inside

    def _check(self, kv: KVCache) -> None:
        """Raise CacheError for a cache of another model, block size or kv_dtype."""
        if self._kind and self._kind != _kind(kv):
            raise CacheError("the prefix cache holds KV of another model, or of another block_size or kv_dtype")

    def _open(self, kv: KVCache, shapes: Mapping[int, LayerShape]) -> PrefixTree:
        """Return the tree, for which the layers of a cache are known from now on."""
        self._check(kv)
        if self._tree is None:
            self._kind, self._tree = _kind(kv), PrefixTree(kv.settings.block_size)
            for number, shape in shapes.items():
                self._shapes[number], self._blocks[number] = shape, {}
                self._node_bytes += shape.block_bytes(kv.settings.block_size)
            if self.host_bytes is None:
                ranks = kv.settings.ranks
                self.host_bytes = ranks.least(available_host_memory(ranks) or 1 << 62) // _SHARE
        for layer in kv.offloaded:
            if layer.plan is not None:
                layer.store.kept = self._blocks[layer.number]
        kv.streams.memory.reclaim = self.drop_oldest
        return self._tree

    def _share(self, kv: KVCache, seq: int, number: int, node: Node) -> None:
        """Hold block `number` of a sequence in every layer. Raises HostMemoryError, with nothing changed."""
        size, memory = kv.settings.block_size, kv.streams.memory
        start, stop = number * size, number * size + len(node.tokens)
        copies = {
            layer.number: copied(layer, seq, start, stop, size, memory, self._shapes[layer.number].format)
            for layer in kv.layers
            if isinstance(layer, DenseLayer)
        }
        shared = {layer.number: layer.store.hold(seq, number) for layer in kv.offloaded}
        for layer, block in (copies | shared).items():
            self._blocks[layer][node] = block

    def _drop(self, node: Node) -> None:
        assert self._tree is not None
        self._tree.remove(node)
        for blocks in self._blocks.values():
            blocks.pop(node).owners -= 1

    def _trim(self) -> None:
        """Drop what host_bytes does not allow."""
        while self.kept_bytes > (self.host_bytes or 0):
            if self._indexes:
                del self._indexes[0]
            elif not self.drop_oldest():
                return

    def _index(self, kv: KVCache, ids: Tensor, salt: str) -> Indexes | None:
        """Return indexes of a prompt that more than half of this one begins like."""
        kind = _index_kind(kv)
        fit = [one for one in self._indexes if (one.kind, one.salt) == (kind, salt) and 2 * common(one.ids, ids) > len(ids)]
        if not fit:
            return None
        best = max(fit, key=lambda one: common(one.ids, ids))
        self._indexes = [*(one for one in self._indexes if one is not best), best]
        return best


def _kind(kv: KVCache) -> tuple[object, ...]:
    return kv.origin, kv.settings.block_size, kv.settings.kv_dtype, tuple(layer.number for layer in kv.layers)


def _index_kind(kv: KVCache) -> tuple[object, ...]:
    return kv.settings.method, kv.settings.seed


def _refusal(kv: KVCache) -> str | None:
    """Return why prompts of a cache cannot be kept, None where they can."""
    if kv.origin is None:
        return "the model has layers that keep a window or a state, and no KV of all tokens"
    method = kv.settings.method
    if method.prompt_queries is None:
        return f"{method.name} is built with the queries of a whole prompt"
    return f"{method.name} drops tokens that another prompt would attend to" if method.evicts else None
