"""Contents of a prefix cache: a radix tree over token ids, blocks of KV by its nodes, index snapshots, named entries."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.host_memory import Block, HostMemory, as_bytes
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import IndexState, LayerShape
from kvthaw.cache.passes import updaters
from kvthaw.errors import CacheError, HostMemoryError
from kvthaw.native import Checksum


class Node:
    """Up to a block of tokens that follow the tokens of its parent. Only a leaf may have fewer than a block.

    parent: a root's is the root itself.
    pins: named entries that contain it.
    salt: salt of its prompts, if it is a root.
    order: sorted keys of its children. The longest common prefix with a key is at one of the two neighbours of the key.
    """

    __slots__ = ("children", "order", "parent", "pins", "salt", "tokens")

    def __init__(self, parent: Node | None, tokens: Tensor, salt: str = "") -> None:
        self.parent, self.tokens, self.pins, self.salt = parent or self, tokens, 0, salt
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []

    def add(self, child: Node) -> None:
        """Add a child. It replaces a child with equal tokens."""
        key = _key(child.tokens)
        if key not in self.children:
            insort(self.order, key)
        self.children[key] = child

    def drop(self, child: Node) -> None:
        """Remove a child."""
        key = _key(child.tokens)
        del self.children[key]
        del self.order[bisect_left(self.order, key)]

    def nearest(self, block: Tensor) -> tuple[Node | None, int]:
        """Return the child with the longest common prefix with a block, and the prefix's length; (None, 0) if there is none."""
        at = bisect_left(self.order, _key(block))
        beside = [self.children[key] for key in self.order[max(0, at - 1) : at + 1]]
        same = [common(child.tokens, block) for child in beside]
        best = max(same, default=0)
        return (beside[same.index(best)], best) if best else (None, 0)

    def beginnings(self, tokens: Tensor) -> Iterator[Node]:
        """Yield the children whose tokens are a proper prefix of `tokens`, the longest first."""
        key, at = _key(tokens), bisect_left(self.order, _key(tokens))
        while at:
            child = self.children[self.order[at - 1]]
            same = common(child.tokens, tokens)
            if same == len(child.tokens):
                yield child
                at -= 1
            else:  # all prefixes begin with the tokens that this child shares
                at = bisect_right(self.order, key[: same * tokens.itemsize], hi=at)


class PrefixTree:
    """The cached prefixes, by salt. Prompts with different salts share nothing.

    nodes: all nodes, the least recently used first. A node comes after its children, so the first without pins is a leaf.
    pinned: number of pinned nodes.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[Node, None] = {}
        self.pinned = 0
        self._roots: dict[str, Node] = {}

    def match(self, ids: Tensor, salt: str) -> tuple[list[Node], int]:
        """Return the nodes of a prompt's [T] longest prefix, and its tokens. The last node may continue differently."""
        path: list[Node] = []
        node, done = self._roots.get(salt), 0
        for block in ids.split(self.block_size):
            if node is None:
                break
            found = node.children.get(_key(block))
            if found is None:
                near, same = node.nearest(block)
                return path if near is None else [*path, near], done + same
            path.append(found)
            node, done = found, done + len(block)
        return path, done

    def insert(self, ids: Tensor, salt: str) -> Iterator[tuple[Node, bool]]:
        """Yield (node, new) for each block of a prompt [T]. A new node joins the tree when the next one is requested.

        The last node may hold more tokens than the prompt has.
        """
        node = self._roots.get(salt) or Node(None, ids[:0], salt)
        try:
            for block in ids.split(self.block_size):
                found = node.children.get(_key(block))
                if found is None:
                    near, same = node.nearest(block)
                    found = near if same == len(block) else None
                new = found is None
                found = found or Node(node, block.clone())
                yield found, new
                if node.parent is node:
                    self._roots[salt] = node  # the root was removed if its last child was dropped meanwhile
                node.add(found)
                self._pin(found, 1)  # so that nothing on the path is dropped meanwhile
                node = found
        finally:
            self.pin(node, -1)
            self.touch(node)

    def covered(self, node: Node) -> list[Node]:
        """Return the node's siblings that hold a proper prefix of its tokens and have no pins."""
        return [other for other in node.parent.beginnings(node.tokens) if not other.pins]

    def touch(self, node: Node) -> None:
        """Mark a node and its ancestors as the most recently used."""
        while node.parent is not node:
            self.nodes.pop(node, None)
            self.nodes[node] = None
            node = node.parent

    def pin(self, node: Node, pins: int) -> None:
        """Add `pins` pins to a node and its ancestors; a negative number removes pins."""
        while node.parent is not node:
            self._pin(node, pins)
            node = node.parent

    def unpinned(self) -> Iterator[Node]:
        """Yield the nodes without pins, the least recently used first."""
        return (node for node in self.nodes if not node.pins)

    def remove(self, node: Node) -> None:
        """Remove a leaf."""
        del self.nodes[node]
        parent = node.parent
        parent.drop(node)
        if parent.parent is parent and not parent.children:
            del self._roots[parent.salt]

    def _pin(self, node: Node, pins: int) -> None:
        before, node.pins = node.pins, node.pins + pins
        self.pinned += (node.pins > 0) - (before > 0)


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()


def common(one: Tensor, other: Tensor) -> int:
    """Return the length of the common prefix of two token sequences."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).nonzero()
    return int(differ[0, 0]) if len(differ) else n


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Statistics of a prefix cache.

    queries: tokens of the prompts that were looked up.
    hits: tokens of these prompts that did not go through the model again.
    kept_tokens: tokens cached now.
    kept_bytes: bytes of memory.
    disk_bytes: bytes of the file. Some blocks are in both.
    evicted_tokens: tokens dropped so far.
    names: named entries.
    refused: why prompts are prefilled whole; None if they need not be.
    """

    queries: int = 0
    hits: int = 0
    kept_tokens: int = 0
    kept_bytes: int = 0
    disk_bytes: int = 0
    evicted_tokens: int = 0
    names: Sequence[str] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A prompt that is kept under a name. A replaced entry is another object.

    ids: its tokens [T].
    node: its last node.
    salt: see PrefixCache.
    about: any JSON value, given with the name.
    """

    ids: Tensor
    node: Node
    salt: str
    about: Any = None


class NotKeptError(CacheError):
    """A prompt cannot be kept under a name: there is no room for it, or no cache that keeps it."""


Key = tuple[str, str]
"""The salt and the name of an entry. Entries of different salts are unrelated."""


@dataclass(frozen=True, slots=True)
class _Indexes:
    """Indexes of a prompt [T], by layer number.

    kind: method and seed of the caches that may use them, and the salt.
    """

    ids: Tensor
    kind: tuple[object, ...]
    layers: Mapping[int, IndexState]

    @property
    def saved(self) -> bool:
        """Whether the indexes are tensors from a file, which each sequence loads itself."""
        return any(isinstance(one.held, Mapping) for one in self.layers.values())


class IndexSnapshots:
    """Indexes of kept prompts, the least recently used first."""

    def __init__(self) -> None:
        self._all: list[_Indexes] = []

    def nbytes(self) -> int:
        """Return the bytes of host memory, including bytes shared with a sequence."""
        return sum(state.nbytes() for one in self._all for state in one.layers.values())

    def drop_oldest(self) -> bool:
        """Drop the least recently used indexes. Returns whether there were any."""
        return bool(self._all) and self._all.pop(0) is not None

    def add(self, kv: KVCache, ids: Tensor, salt: str, layers: Mapping[int, IndexState | None]) -> None:
        """Keep indexes of a prompt [T], if there are any."""
        if found := {number: each for number, each in layers.items() if each is not None}:
            self._all.append(_Indexes(ids, _index_kind(kv, salt), found))

    def keep(self, kv: KVCache, ids: Tensor, salt: str, seq: int, *, whole: bool) -> None:
        """Keep the indexes of a sequence of a cache, unless a prompt that shares more than half of it has some.

        whole: unless the indexes of exactly this prompt [T] are kept.
        """
        found = self._nearest(kv, ids, salt)
        if found is None or found.saved or (whole and len(found.ids) != len(ids)):
            if found is not None and found.saved:
                self._all = [one for one in self._all if one is not found]
            self.add(kv, ids, salt, {layer.number: updater.snapshot(seq) for layer, updater in updaters(kv.offloaded)})

    def upto(self, kv: KVCache, ids: Tensor, salt: str) -> dict[int, IndexState]:
        """Return the indexes, by layer, of the longest common prefix with a prompt that shares more than half of this one."""
        best = self._nearest(kv, ids, salt)
        if best is None:
            return {}
        tokens = common(best.ids, ids)
        return {number: replace(one, end=min(one.end, tokens)) for number, one in best.layers.items()}

    def of(self, kv: KVCache, entry: Entry) -> Mapping[int, IndexState]:
        """Return the indexes of exactly an entry's tokens, by layer; none if they are not kept."""
        kind = _index_kind(kv, entry.salt)
        mine = [one.layers for one in self._all if one.kind == kind and torch.equal(one.ids, entry.ids)]
        return mine[-1] if mine else {}

    def _nearest(self, kv: KVCache, ids: Tensor, salt: str) -> _Indexes | None:
        """Return the indexes of a prompt that shares more than half of this one as a prefix, as if used now."""
        kind = _index_kind(kv, salt)
        fit = [one for one in self._all if one.kind == kind and 2 * common(one.ids, ids) > len(ids)]
        best = max(fit, key=lambda one: common(one.ids, ids), default=None)
        if best is not None:
            self._all = [*(one for one in self._all if one is not best), best]
        return best


def _index_kind(kv: KVCache, salt: str) -> tuple[object, ...]:
    """Return the properties that caches must share to exchange indexes."""
    return kv.settings.method, kv.settings.seed, salt


class PrefixBlocks:
    """Blocks by layer and node. A node's blocks are in memory in all layers or in none.

    file: None: there is no file.
    slots: slots of the nodes in the file. A node that returns to memory keeps its slot, so it need not be written again.
    """

    def __init__(self, file: BlockFile | None) -> None:
        self.file, self.slots = file, dict[Node, Slot]()
        self.layers: dict[int, dict[Node, Block]] = {}
        self.shapes: dict[int, LayerShape] = {}
        self.size = 0
        """Tokens of a block."""

    def open(self, shapes: Mapping[int, LayerShape], block_size: int) -> None:
        """Set the layers' shapes and the block size."""
        self.size, self.shapes = block_size, dict(shapes)
        self.layers = {number: {} for number in shapes}

    @property
    def node_bytes(self) -> int:
        """Bytes of a node's blocks."""
        return sum(shape.block_bytes(self.size) for shape in self.shapes.values())

    @property
    def held(self) -> int:
        """Number of nodes in memory."""
        return len(next(iter(self.layers.values()), ()))

    def holds(self, node: Node) -> bool:
        """Return whether a node is in memory."""
        return any(node in blocks for blocks in self.layers.values())

    def hold(self, node: Node, blocks: Mapping[int, Block]) -> None:
        """Add a node's blocks, by layer, as one more owner."""
        for number, block in blocks.items():
            self.layers[number][node] = block.share()

    def shared(self, kv: KVCache, seq: int, number: int, node: Node) -> Mapping[int, Block]:
        """Return block `number` of a sequence in every layer, or a copy of a dense layer's rows. Raises HostMemoryError."""
        size = kv.settings.block_size
        start, stop = number * size, number * size + len(node.tokens)
        dense = {layer.number: layer for layer in kv.layers if isinstance(layer, DenseLayer)}
        copies = self.new(kv.streams.memory, dense)
        for layer, block in copies.items():
            rows = self.shapes[layer].format.encode(dense[layer].read(seq, start, stop))
            block.data[:, : stop - start].copy_(rows, non_blocking=True)
        return copies | {layer.number: layer.store.blocks(seq)[number] for layer in kv.offloaded}

    def release(self, node: Node) -> None:
        """Release a node's blocks in memory."""
        for blocks in self.layers.values():
            blocks.pop(node).release()

    def erase(self, node: Node) -> None:
        """Free a node's slot in the file."""
        slot = self.slots.pop(node)
        slot.file.free(slot)

    def write(self, node: Node) -> None:
        """Write a node's blocks to the file. Raises OSError."""
        if node not in self.slots and self.file is not None:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # copies to blocks may only be enqueued
            self.slots[node] = self.file.write([blocks[node].data for blocks in self.layers.values()])

    def read(self, nodes: Sequence[Node], memory: HostMemory) -> tuple[int, Exception | None]:
        """Read nodes from the file into memory. Returns how many of the first ones succeeded, and the error that ended it."""
        coming, error = list[tuple[Node, dict[int, Block], Future[None]]](), None
        with ThreadPoolExecutor(2) as threads:  # concurrent with pinning
            try:
                for node in nodes:
                    blocks, slot = self.new(memory, self.shapes), self.slots[node]
                    read = threads.submit(slot.file.read, slot, [each.data for each in blocks.values()])
                    coming.append((node, blocks, read))
            except HostMemoryError as lack:
                error = lack
        for done, (node, blocks, read) in enumerate(coming):
            try:
                read.result()
            except CacheError as lost:
                return done, lost
            self.hold(node, blocks)
        return len(coming), error

    def new(self, memory: HostMemory, layers: Iterable[int]) -> dict[int, Block]:
        """Return uninitialised host blocks for these layers. Raises HostMemoryError."""
        shapes = {number: self.shapes[number] for number in layers}
        pinned = any(shape.keys.is_cuda for shape in shapes.values())
        for size, count in Counter(shape.block_bytes(self.size) for shape in shapes.values()).items():
            memory.prepare(count, size, pinned=pinned)
        return {number: shape.block(self.size, memory) for number, shape in shapes.items()}


def cache_kind(kv: KVCache) -> tuple[object, ...]:
    """Return the properties that caches must share to exchange blocks."""
    return kv.origin, kv.settings.block_size, kv.settings.kv_dtype, tuple(layer.number for layer in kv.layers)


def refusal(kv: KVCache) -> str | None:
    """Return why prompts of a cache cannot be kept; None if they can."""
    if kv.origin is None:
        return "the model has layers that keep a window or a state, and no KV of all tokens"
    method = kv.settings.method
    return f"{method.name} is built with the queries of a whole prompt" if method.prompt_queries is None else None


FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Error numbers that the system returns when a disk is full."""
_AT_ONCE = 8  # blocks written or read at a time


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a file: its number, and the checksum of each tensor in it."""

    file: BlockFile
    number: int
    digests: Sequence[bytes]


class BlockFile:
    """Slots of one size in an unlinked file, which the system deletes when the process ends, even after a crash.

    limit: the most bytes; None: all that the disk has free.
    size: bytes of a slot, set by the first write.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        """Create the file, and the folder if it is missing. Raises OSError if that fails."""
        folder.mkdir(0o700, parents=True, exist_ok=True)  # names of kept documents are in it too
        self.folder, self.limit, self.size = folder, limit, 0
        self._file, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._file).atexit = False
        os.unlink(name)
        self._free: list[int] = []
        self._slots = 0

    def write(self, tensors: Sequence[Tensor]) -> Slot:
        """Write tensors of any device to a free slot. Raises OSError if the disk is full or the limit is reached."""
        self.size = self.size or sum(tensor.nbytes for tensor in tensors)
        if not self._free:
            if self.limit is not None and (self._slots + 1) * self.size > self.limit:
                raise OSError(errno.ENOSPC, f"{self.limit:,} bytes of blocks are there", str(self.folder))
            self._free.append(self._slots)
            self._slots += 1
        number = self._free[-1]
        digests = self._each(number, [tensor.cpu() for tensor in tensors], self._write)
        self._free.pop()
        return Slot(self, number, digests)

    def read(self, slot: Slot, tensors: Sequence[Tensor]) -> None:
        """Read a slot into tensors on the host. Raises CacheError if the file cannot be read or its content has changed."""
        try:
            found = self._each(slot.number, tensors, self._read)
        except OSError as error:
            raise CacheError(f"blocks of KV in a file in {self.folder} cannot be read: {error.strerror}") from error
        if found != slot.digests:
            raise CacheError(f"blocks of KV in a file in {self.folder} are not what was written")

    def free(self, slot: Slot) -> None:
        """Mark a slot as free."""
        self._free.append(slot.number)

    def _each(self, number: int, tensors: Sequence[Tensor], work: Any) -> list[bytes]:
        ends = torch.tensor([tensor.nbytes for tensor in tensors]).cumsum(0).tolist()
        starts = [number * self.size + end - tensor.nbytes for end, tensor in zip(ends, tensors, strict=True)]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(work, starts, tensors))

    def _write(self, at: int, tensor: Tensor) -> bytes:
        data, done = as_bytes(tensor), 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at + done)
        return Checksum(data).digest()

    def _read(self, at: int, tensor: Tensor) -> bytes:
        data, done = as_bytes(tensor), 0
        while done < len(data) and (more := os.preadv(self._file, [data[done:]], at + done)):
            done += more
        return Checksum(data[:done]).digest()
