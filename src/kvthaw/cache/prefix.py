"""Prefix cache: KV of earlier prompts by token ids, for prompts with a common prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.host_memory import Block, available_host_memory
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import IndexState, LayerShape, LayerState
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.prefix_kept import (
    FULL,
    BlockFile,
    Entry,
    IndexSnapshots,
    Key,
    Node,
    NotKeptError,
    PrefixBlocks,
    PrefixStats,
    PrefixTree,
    cache_kind,
    refusal,
)
from kvthaw.cache.step import Step
from kvthaw.errors import CacheError, ConfigError, HostMemoryError, at_least
from kvthaw.formatting import read_bytes
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
_SHARE = 4  # 1 / the part of free host memory that is used by default


class PrefixCache:
    """Cache the KV of prompts, so that a later prompt prefills only the tokens after the longest cached prefix.

    Blocks are shared copy-on-write with sequences and outlive them. Only tokens that were prefilled densely are kept, not
    tokens decoded under a method. Indexes are rebuilt from the rows. A prompt therefore gets the KV and the index of a
    fresh prefill in chunks that end at the same tokens.

    IceCache's trees take longer to build than the prefill, so they are shared. If a prompt has few new tokens, these are
    inserted into the tree, like the tokens of a next turn. At least the last 128 tokens of a prompt always go through the
    model, for indexes that read its last queries.

    A prefix cache holds KV of one model, one block_size and one kv_dtype, of caches under any method. Prompts with
    different salts share nothing. Nor do prompts that the model computes under different adapters, weights, rotary angles
    or autocast. Weights that are changed through `.data` are not noticed, as by PEFT's merge_adapter(): make another
    prefix cache.

    Raises ConfigError if no file can be created in kv_dir.

    host_bytes: most bytes of blocks, on host or device, and of trees; a number or text such as "8GiB". None: a quarter of
        the free host memory. The least recently used blocks are evicted first, and earlier if a cache has no other memory
        for a request. Named entries stay.
    kv_dir: a folder for a file of evicted blocks, which are read back for a prompt with that prefix. None: evicted blocks
        are dropped. The file is unlinked and ends with the process.
    disk_bytes: most bytes of the file, a number or text; None: the disk's free space. Beyond it the least recently used
        blocks are dropped. Blocks that cannot be written or read are dropped with a warning, and their prompts are
        prefilled again.
    """

    def __init__(
        self, *, host_bytes: int | str | None = None, kv_dir: str | Path | None = None, disk_bytes: int | str | None = None
    ) -> None:
        check_type(int | str | None, host_bytes=host_bytes, disk_bytes=disk_bytes)
        check_type(str | Path | None, kv_dir=kv_dir)
        self.host_bytes = None if host_bytes is None else read_bytes(host_bytes, "host_bytes")
        limit = None if disk_bytes is None else read_bytes(disk_bytes, "disk_bytes")
        at_least(0, host_bytes=self.host_bytes, disk_bytes=limit)
        if kv_dir is None and limit is not None:
            raise ConfigError(f"disk_bytes is {limit:,} and kv_dir None; kv_dir names the folder that has the file")
        try:
            file = None if kv_dir is None else BlockFile(Path(kv_dir), limit)
        except OSError as error:
            raise ConfigError(f"kv_dir is {str(kv_dir)!r}; no file can be made there: {error.strerror}") from error
        self._kept, self._writes = PrefixBlocks(file), file is not None
        self.refused: str | None = None
        self._tree = PrefixTree(1 << 30)  # of no cache yet
        self._entries: dict[Key, Entry] = {}
        self._indexes = IndexSnapshots()
        self._kind: tuple[object, ...] = ()
        self._first = ""
        self._queries = self._hits = self._evicted = 0

    def fill(self, kv: KVCache, ids: Tensor, *, seq: int | None = None, salt: str = "") -> int:
        """Start a prompt [T] with its longest cached prefix. Returns how many tokens need not go through the model.

        The sequence must be empty.

        seq: its slot in a running batch; None for a cache of one sequence.
        """
        self.refused, ids = refusal(kv), ids.cpu()
        self._queries += len(ids)
        path, tokens = self._found(kv, ids, salt)
        path, size = self._in_memory(kv, path), self._tree.block_size
        tokens = kv.settings.ranks.least(min(tokens, len(path) * size))  # processes evict each for itself
        if tokens <= 0:
            return 0
        path = path[: -(-tokens // size)]
        rows = {number: [blocks[node] for node in path] for number, blocks in self._kept.layers.items()}
        known = self._indexes.upto(kv, ids, self._own(kv, salt))

        def take(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
            shape, blocks = self._kept.shapes[layer.number], [block.share() for block in rows[layer.number]]
            state = LayerState(blocks, tokens, shape.format, index=known.get(layer.number))
            try:
                layer.begin(step, shape, {seq or 0: state})
            finally:
                state.release()

        with kv.sequences.prompt(len(ids)) if seq is None else kv.sequences.prompts({seq: len(ids)}):
            kv.append_stored_prompt(tokens, None, take)
        kv.sequences.cached_tokens += tokens
        self._hits += tokens
        self._trim()
        return tokens

    def fetch(self, kv: KVCache, ids: Tensor, tokens: int, *, salt: str = "") -> bool:
        """Read blocks of a prompt's cached prefix from the file into memory, so that fill() need not wait for all of them.

        tokens: about how many to read; at least one block.

        Returns whether more blocks remain in the file, in every process of a split model.
        """
        path, _ = self._found(kv, ids, salt)
        absent = [node for node in path if not self._kept.holds(node)]
        some, more = max(1, tokens // kv.settings.block_size), False
        if len(absent) > some:
            wanted = path.index(absent[some])
            more = len(self._in_memory(kv, path[:wanted])) == wanted
        return bool(kv.settings.ranks.least(more))

    def known(self, kv: KVCache, ids: Tensor, *, salt: str = "") -> int:
        """Return how many tokens of a prompt [T] fill() would take."""
        return self._found(kv, ids, salt)[1]

    def keep(
        self,
        kv: KVCache,
        ids: Tensor,
        *,
        seq: int = 0,
        salt: str = "",
        name: str | None = None,
        about: Any = None,
        leaves_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Cache the first tokens of a sequence, ids [T], all of them of its prompt, which may be incomplete.

        They must have arrived on the host (`KVCache.wait`). Raises CacheError if they cannot be kept under a name.

        name: keep them until forget(name).
        about: any JSON value, kept with the name.
        leaves_room: returns whether all entries, this one included, leave other requests the memory that they need.
        """
        self.refused, ids, own = refusal(kv), ids.cpu(), salt
        if self.refused is None and len(ids):
            shapes = {one.number: LayerShape.of(one, seq, kv.settings.kv_dtype) for one in kv.layers if one.keeps_all}
            own = self._insert(kv, shapes, ids, salt, lambda at, node: self._kept.shared(kv, seq, at, node))
            self._indexes.keep(kv, ids, own, seq, whole=name is not None)
        self._trim()
        if name is not None:
            self._name((salt, name), ids, own, about, leaves_room)

    def _name(self, key: Key, ids: Tensor, own: str, about: Any, leaves_room: Callable[[], bool]) -> None:
        """Pin a cached prompt [T] under a name until forget(name). Replaces an entry of the same name and salt.

        Raises NotKeptError if part of it is not cached, or if host_bytes or leaves_room does not allow it.

        own: its salt in the tree; see _own().
        about, leaves_room: as for keep().
        """
        name = key[1]
        path, tokens = self._tree.match(ids, own)
        tokens = min(tokens, sum(len(node.tokens) for node in path if self._kept.holds(node)))
        if not path or tokens < len(ids):
            raise NotKeptError(f"{name!r} cannot be kept: {self.refused or f'{tokens} of its {len(ids)} tokens are in memory'}")
        self._tree.pin(path[-1], 1)
        fits = self.pinned_bytes <= (self.host_bytes or 0)
        if not fits or not leaves_room():
            self._tree.pin(path[-1], -1)
            short = f"host_bytes is {self.host_bytes:,}, too little for all entries"
            why = "all entries would leave too little host memory to other requests" if fits else short
            raise NotKeptError(f"{name!r} cannot be kept: {why}")
        before, self._entries[key] = self._entries.get(key), Entry(ids, path[-1], own, about)
        if before is not None:
            self._tree.pin(before.node, -1)

    @property
    def entries(self) -> dict[Key, Entry]:
        """The named entries. May be read on any thread."""
        return dict(self._entries)

    def entry(self, name: str, salt: str = "") -> Entry:
        """Return the entry of a name. Raises CacheError if there is none."""
        if (salt, name) not in self._entries:
            raise CacheError(f"no prompt is kept as {name!r}")
        return self._entries[salt, name]

    def content(self, kv: KVCache, entry: Entry) -> Iterator[tuple[int, LayerShape, Tensor, IndexState | None]]:
        """Yield the number and the shape of each layer, and an entry's rows [H, T, *tail] on the host as they are stored.

        The last item is the layer's index of exactly these tokens, if one is kept for caches such as this one.
        """
        path, tokens = self._tree.match(entry.ids, entry.salt)
        indexes = self._indexes.of(kv, entry)
        for number, blocks in self._kept.layers.items():
            rows = torch.cat([blocks[node].data.cpu() for node in path], dim=1)[:, :tokens]
            yield number, self._kept.shapes[number], rows.contiguous(), indexes.get(number)

    def restore(
        self,
        kv: KVCache,
        name: str,
        ids: Tensor,
        layers: Mapping[int, tuple[LayerShape, LayerState]],
        *,
        salt: str = "",
        about: Any = None,
        leaves_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Cache a prompt [T] under a name, with blocks and indexes that were read from elsewhere, for caches such as this one.

        Raises CacheError if it cannot be kept.

        layers: the shape and the state of each layer.
        about, leaves_room: as for keep().
        """
        self.refused, own = refusal(kv), salt
        if self.refused is None:
            shapes = {number: shape for number, (shape, _) in layers.items()}
            blocks = {number: state.blocks for number, (_, state) in layers.items()}
            own = self._insert(kv, shapes, ids, salt, lambda at, _: {number: every[at] for number, every in blocks.items()})
            self._indexes.add(kv, ids, own, {number: state.index for number, (_, state) in layers.items()})
        self._trim()
        self._name((salt, name), ids, own, about, leaves_room)

    def forget(self, name: str, salt: str = "") -> None:
        """Remove an entry's name. Its blocks are then evicted like others. Raises CacheError if there is none."""
        entry = self.entry(name, salt)
        del self._entries[salt, name]
        self._tree.pin(entry.node, -1)

    def clear(self) -> None:
        """Drop everything, including named entries, for a model whose weights have changed."""
        for salt, name in list(self._entries):
            self.forget(name, salt)
        self._indexes = IndexSnapshots()
        while self._tree.nodes:
            self._drop(next(iter(self._tree.nodes)))

    def drop_oldest(self) -> bool:
        """Evict the least recently used block of tokens from memory in every layer: to the file if it has room.

        Returns whether there was one.
        """
        node = next(filter(self._kept.holds, self._tree.unpinned()), None)
        if node is None:
            return False
        if self._written(node):
            self._kept.release(node)
        else:
            self._evicted += self._drop(node)
        return True

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory of all cached blocks and indexes."""
        return self._kept.held * self._kept.node_bytes + self._indexes.nbytes()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that named entries hold."""
        return self._kept.node_bytes * self._tree.pinned

    def pinned_blocks(self) -> tuple[int, dict[int, int]]:
        """Return the number of blocks per layer that named entries hold, and the bytes of a block by layer."""
        sizes = {number: shape.block_bytes(self._kept.size) for number, shape in self._kept.shapes.items()}
        return self._tree.pinned, sizes

    def stats(self) -> PrefixStats:
        """Return statistics of the cached content and the lookups so far."""
        return PrefixStats(
            queries=self._queries,
            hits=self._hits,
            kept_tokens=sum(len(node.tokens) for node in list(self._tree.nodes)),
            kept_bytes=self.kept_bytes,
            disk_bytes=len(self._kept.slots) * self._kept.node_bytes,
            evicted_tokens=self._evicted,
            names=sorted(name for _, name in self._entries),
            refused=self.refused,
        )

    # Inside

    def _own(self, kv: KVCache, salt: str) -> str:
        """Return a prompt's salt, extended if the model computes otherwise than for the first, as under another adapter."""
        now = "" if kv.origin is None else kv.origin()
        return salt if now == self._first else f"{now} {salt}"

    def _check(self, kv: KVCache) -> None:
        """Raise CacheError for a cache of another model, block size or kv_dtype."""
        if self._kind and self._kind != cache_kind(kv):
            raise CacheError("the prefix cache holds KV of another model, or of another block_size or kv_dtype")

    def _open(self, kv: KVCache, shapes: Mapping[int, LayerShape]) -> None:
        """Attach this to a cache: the first cache fixes the layers' shapes."""
        self._check(kv)
        if not self._kind:
            self._kind, self._tree = cache_kind(kv), PrefixTree(kv.settings.block_size)
            self._first = "" if kv.origin is None else kv.origin()
            self._kept.open(shapes, kv.settings.block_size)
            if self.host_bytes is None:
                ranks = kv.settings.ranks
                self.host_bytes = ranks.least(available_host_memory(ranks) or 1 << 62) // _SHARE
        for layer in kv.offloaded:
            layer.store.kept = self._kept.layers[layer.number]
        kv.streams.memory.reclaim = self.drop_oldest

    def _insert(
        self,
        kv: KVCache,
        shapes: Mapping[int, LayerShape],
        ids: Tensor,
        salt: str,
        blocks: Callable[[int, Node], Mapping[int, Block]],
    ) -> str:
        """Cache the blocks of a prompt [T] until memory is short. Returns their salt in the tree.

        shapes: of the layers.
        blocks: blocks(n, node) returns the n-th block of each layer. May raise HostMemoryError.
        """
        self._open(kv, shapes)
        last, salt = None, self._own(kv, salt)
        try:
            for at, (node, new) in enumerate(self._tree.insert(ids, salt)):
                if new or not self._kept.holds(node):
                    self._kept.hold(node, blocks(at, node))
                last = node
        except HostMemoryError as error:
            _log.warning("a prompt is kept in part: %s", error)
        for other in () if last is None else self._tree.covered(last):
            self._drop(other)
        return salt

    def _drop(self, node: Node) -> int:
        """Drop a block of tokens and its descendants, in memory and in the file. Returns the number of their tokens."""
        dropped = len(node.tokens) + sum(self._drop(child) for child in list(node.children.values()))
        self._tree.remove(node)
        if self._kept.holds(node):
            self._kept.release(node)
        if node in self._kept.slots:
            self._kept.erase(node)
        return dropped

    def _written(self, node: Node) -> bool:
        """Write a block of tokens to the file, and drop others if it is full. Returns whether the block is in the file."""
        while self._writes and node not in self._kept.slots:
            try:
                self._kept.write(node)
            except OSError as error:
                oldest = next((other for other in self._tree.unpinned() if other in self._kept.slots), None)
                if error.errno not in FULL or oldest is None:
                    _log.warning("KV that memory has no room for is dropped, since it cannot be written: %s", error)
                    self._writes = False
                elif self._kept.holds(oldest):
                    self._kept.erase(oldest)
                else:
                    self._evicted += self._drop(oldest)
        return node in self._kept.slots

    def _found(self, kv: KVCache, ids: Tensor, salt: str) -> tuple[list[Node], int]:
        """Return the nodes of a prompt's cached prefix, and how many of its tokens may be used; none if prompts are not kept."""
        if refusal(kv) is not None or not self._kind:
            return [], 0
        self._check(kv)
        path, tokens = self._tree.match(ids.cpu(), self._own(kv, salt))
        tokens = max(0, min(tokens, len(ids) - RECENT_QUERIES))
        return path[: -(-tokens // self._tree.block_size)], tokens

    def _in_memory(self, kv: KVCache, path: list[Node]) -> list[Node]:
        """Read the missing nodes of a path from the file, as if used now. Returns the path up to the first that is lost."""
        if not path:
            return path
        self._tree.touch(path[-1])
        absent = [node for node in path if not self._kept.holds(node)]
        need = len(absent) * self._kept.node_bytes
        self._tree.pin(path[-1], 1)  # so that nothing on the path is dropped meanwhile
        try:
            while need and self.kept_bytes + need > (self.host_bytes or 0) and self.drop_oldest():
                pass  # before they are read; if the prompt alone exceeds host_bytes, _trim() follows
            read, error = self._kept.read(absent, kv.streams.memory)
        finally:
            self._tree.pin(path[-1], -1)
        if error is not None:
            _log.warning("a prompt is prefilled in part: %s", error)
            if isinstance(error, CacheError) and not absent[read].pins:
                self._evicted += self._drop(absent[read])
        return path[: path.index(absent[read])] if read < len(absent) else path

    def _trim(self) -> None:
        """Evict until the cache is within host_bytes."""
        while self.kept_bytes > (self.host_bytes or 0):
            if not self._indexes.drop_oldest() and not self.drop_oldest():
                return
