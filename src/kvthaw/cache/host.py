"""The frozen rows of a layer: an append-only store in blocks of host memory, some of them on the device.

A row is one token of one KV head, its K then its V, stored as `RowFormat` says. Rows lie in token order in blocks of [H, E,
*tail], which are pinned if there is a GPU. Rows are never rewritten. Sequences with a common prefix (beams, repeated
prompts) therefore share blocks. A block is copied only when a sequence writes into a shared one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceBlocks
from kvthaw.cache.host_memory import Block, HostMemory, held_bytes
from kvthaw.cache.step import Moves
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import capturing, sent, upload
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.stream_keys import definition as stream_definition
from kvthaw.kernels.stream_keys import stream_keys, stream_rows
from kvthaw.kernels.uva_gather import COUNTERS
from kvthaw.native import gather_rows

Change = tuple[Tensor, list[int]]
"""A view of a table's tensor, and the values to write there."""


class BlockTable:
    """Which blocks a sequence has, and where each lies, on the host and in tensors on the device.

    The tensors keep their addresses while there is room. Only the rows of changed sequences are written.

    blocks: by sequence, earlier positions first. Whoever changes the lists calls changed() afterwards.
    block_size: tokens per block.
    version: number of changes so far.
    addresses: [seqs, blocks] int64 on the device, the address of each block; 0 behind the last. A sequence without blocks
        has any.
    on_host: [seqs, blocks] bool on the device, whether the block lies on the host.
    """

    def __init__(self, seqs: int, block_size: int) -> None:
        self.blocks: list[list[Block]] = [[] for _ in range(seqs)]
        self.block_size, self.version = block_size, 0
        self.addresses = torch.empty((0, 0), dtype=torch.int64)
        self.on_host = torch.empty((0, 0), dtype=torch.bool)
        self._known: tuple[int, Tensor] | None = None  # a version, and its addresses on the CPU
        self._changed = set[int]()  # sequences, since changes() was called last
        self._at = -1  # the version that the device has
        self._written: list[list[tuple[int, int]]] = []  # what it has of each sequence; below 0: unknown
        self._hosted = set[int]()  # sequences of that version with a block on the host

    def changed(self, *seqs: int) -> None:
        """Record that the blocks of sequences have changed."""
        self._changed.update(seqs)
        self.version += 1

    def copy_slots(self, moves: Moves) -> None:
        """Copy the addresses that the device has of sequences to empty slots; move() must follow."""
        if self._has(moves):
            moves.copy(self.addresses)
            moves.copy(self.on_host)

    def move(self, moves: Moves) -> None:
        """Move the blocks of sequences to empty slots. Raises ValueError, before anything has moved, if one is not empty."""
        if any(self.blocks[to] for to in moves.slots.values()):
            raise ValueError(f"slots {sorted(moves.slots.values())} hold blocks; sequences move to empty slots")
        copied = self._has(moves)
        for seq, to in moves.slots.items():
            self.blocks[seq], self.blocks[to] = [], self.blocks[seq]
            self._hosted.discard(to)
            if seq in self._hosted:
                self._hosted ^= {seq, to}
        if not copied:
            self.changed(*moves.slots, *moves.slots.values())
            return
        for seq, to in moves.slots.items():
            self._written[to] = self._written[seq]
        self._changed.difference_update(moves.slots.values())
        self._at, self.version = self._at + (not self.behind), self.version + 1

    def _has(self, moves: Moves) -> bool:
        """Return whether the device has the addresses of sequences that move."""
        return self._at >= 0 and self._changed.isdisjoint(moves.slots)

    def row(self, seq: int) -> Tensor:
        """Return the address of each block of a sequence, [blocks] int64 on the CPU."""
        return torch.tensor([block.place[0] for block in self.blocks[seq]], dtype=torch.int64)

    def on_cpu(self) -> Tensor:
        """Return the addresses of all sequences' blocks, [seqs, most blocks] int64 on the CPU, 0 padded."""
        known, version = self._known, self.version  # read first: another thread may add blocks meanwhile
        if known is None or known[0] != version:
            rows = [self.row(seq) for seq in range(len(self.blocks))]
            known = self._known = version, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return known[1]

    def which_on_host(self) -> Tensor:
        """Return which blocks lie on the host, [seqs, most blocks] bool on the CPU."""
        rows = [torch.tensor([not block.on_device for block in blocks], dtype=torch.bool) for blocks in self.blocks]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @property
    def some_on_host(self) -> bool:
        """Whether `on_host` marks any block. The device may have an older version than `version`."""
        return bool(self._hosted)

    @property
    def behind(self) -> bool:
        """Whether the device lacks changes."""
        return self._at != self.version

    def lacks(self, idle: Collection[int]) -> bool:
        """Return whether the device lacks changes of sequences that are not idle."""
        return self.behind and (self._at < 0 or not all(seq in idle for seq in self._changed))

    def on(self, device: torch.device) -> Tensor:
        """Return `addresses` with the current addresses; see follow()."""
        return follow([self], device)[0] if self.behind else self.addresses

    def make_room(self, tokens: int, device: torch.device) -> None:
        """Grow the tensors to `tokens` tokens per sequence. They keep their place until a sequence has more."""
        self._allocate(max(8, -(-tokens // self.block_size)), device)

    def changes(self, device: torch.device) -> list[Change]:
        """Return what the tensors lack. The caller writes it."""
        if not self.behind:
            return []
        version, count = self.version, len(self.blocks)
        seqs, self._changed = self._changed, set()
        if self._at < 0 or self.addresses.shape[0] != count:
            seqs = set(range(count))
        places = {seq: self._places(seq) for seq in seqs if seq < count}
        width = max(map(len, places.values()), default=0)
        if self.addresses.shape[0] != count or self.addresses.shape[1] < width:
            self._allocate(max(8, 2 * width), device)
            places |= {seq: self._places(seq) for seq in range(count) if seq not in places}
        found = list[Change]()
        for seq, row in places.items():
            if not row:  # nothing is read of it, whatever the tensors have, and later blocks are compared with that
                self._hosted.discard(seq)
                continue
            written, self._written[seq] = self._written[seq], row
            (self._hosted.add if any(on_host for _, on_host in row) else self._hosted.discard)(seq)
            if row != written:
                most, some_hosted = max(len(row), len(written)), seq in self._hosted or any(on_host for _, on_host in written)
                now, before = ([*some, *[(0, False)] * (most - len(some))] for some in (row, written))
                for mine, column in ((self.addresses, 0), (self.on_host, 1))[: 1 + some_hosted]:
                    its = [int(place[column]) for place in now]
                    if its != [place[column] for place in before]:
                        found.append((mine[seq, :most], its))
        self._at = version
        return found

    def forget_device(self) -> None:
        """Mark what the device has as unknown, after a copy to it failed."""
        self._at, self._written = -1, [[(-1, -1)] * self.addresses.shape[1] for _ in range(self.addresses.shape[0])]

    def _places(self, seq: int) -> list[tuple[int, int]]:
        return [block.place for block in self.blocks[seq]]

    def _allocate(self, width: int, device: torch.device) -> None:
        """Allocate the tensors again if they are too small or of another number of sequences."""
        size = len(self.blocks), width
        if self.addresses.shape[0] != size[0] or self.addresses.shape[1] < width:
            self.addresses = torch.zeros(size, dtype=torch.int64, device=device)
            self.on_host = torch.zeros(size, dtype=torch.bool, device=device)
            self._at, self._written = -1, [[] for _ in range(size[0])]
            self._hosted.clear()


def follow(tables: Sequence[BlockTable], device: torch.device) -> list[Tensor]:
    """Write the changes of several tables with one copy to the device. Returns their `addresses`. No host sync."""
    try:
        if every := [change for table in tables for change in table.changes(device)]:
            if capturing(device):
                raise RuntimeError("blocks have moved while a step is captured; every replay would bring these addresses back")
            numbers = upload([number for _, its in every for number in its], torch.int64, device)
            torch._foreach_copy_([mine for mine, _ in every], numbers.split([len(its) for _, its in every]))
    except BaseException:
        for table in tables:
            table.forget_device()
        raise
    return [table.addresses for table in tables]


class HostStore:
    """Rows of one layer, by sequence and position.

    Rows 0 .. length(seq) - 1 of a sequence are readable. Every block is one contiguous tensor. Row (h, t) begins (h * E + t
    % E) * row_bytes after address `table.row(seq)[t // E]`.

    block_size: E, tokens per block.
    table: the blocks of each sequence.
    pinned: whether blocks are pinned, so that kernels can read them.
    device: blocks lie there while there is room; None: all lie on the host.
    shape: of a block.
    format: how a row is stored; None: in `dtype`, unchanged.
    row_bytes, token_bytes: bytes of a stored row, K and V, and of a stored token, in all heads.
    """

    def __init__(
        self,
        seqs: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        block_size: int = 1024,
        pinned: bool = False,
        memory: HostMemory | None = None,
        format: RowFormat | None = None,
    ) -> None:
        self.table = BlockTable(seqs, block_size)
        self.kv_heads, self.head_dim, self.dtype, self.block_size = kv_heads, head_dim, dtype, block_size
        self.format = format = format or RowFormat(head_dim, dtype)
        self.row_bytes, self.token_bytes = format.row_bytes, kv_heads * format.row_bytes
        self.memory, self.pinned, self.shape = memory or HostMemory(), pinned, (kv_heads, block_size, *format.tail)
        self.memory.stores.add(self)
        self.device: DeviceBlocks | None = None
        self._length = [0] * seqs
        self.kept: MutableMapping[Any, Block] = {}
        """Blocks that a prefix cache owns."""
        self.crossed = torch.zeros(COUNTERS, dtype=torch.int64)
        """Rows that were fetched from blocks on the host, in several partial sums. Counted only if some blocks lie on the
        device."""
        self.arriving: torch.cuda.Event | None = None
        """Event that passes when all rows appended so far have arrived; None: they have."""
        self.ordered = True
        """Whether later work on the current stream already comes after `arriving`."""

    @property
    def seqs(self) -> int:
        return len(self.table.blocks)

    def length(self, seq: int) -> int:
        """Return the number of readable tokens of a sequence."""
        return self._length[seq]

    @property
    def lengths(self) -> list[int]:
        """The number of readable tokens of each sequence."""
        return self._length

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.shape) * self.format.stored.itemsize

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that blocks must share to be interchangeable."""
        return self.shape, self.format.stored, self.pinned

    @property
    def room(self) -> int:
        """Number of blocks that the device has room for."""
        return 0 if self.device is None else max(0, self.device.room) // self.block_bytes

    def host_need(self, blocks: int) -> int:
        """Return the bytes of host memory for `blocks` more blocks, less the blocks that fit on the device."""
        return max(0, blocks - self.room) * held_bytes(self.block_bytes, pinned=self.pinned)

    def _new_blocks(self, count: int) -> list[Block]:
        """Return new blocks, on the device while there is room, then on the host. Raises HostMemoryError, and keeps none then."""
        found = list[Block]()

        def make() -> None:
            while lack := count - len(found):
                if self.device is not None:  # where reclaim() may have made room
                    found.extend(Block(data, on_device=True).share() for data in self.device.take(lack))
                if len(found) < count:
                    found.append(Block(self.memory.allocate_free(self.shape, self.format.stored, pinned=self.pinned)).share())

        try:
            self.memory.retried(make)
        except BaseException:
            found.clear()  # which an error that someone keeps would hold
            raise
        return found

    def nbytes(self, seq: int | None = None, *, on_device: bool = False) -> int:
        """Return the bytes of host or device memory that blocks hold. Shared blocks count once.

        seq: only this sequence's blocks; None: all.
        """
        held = self.table.blocks if seq is None else [self.table.blocks[seq]]
        return sum({block: block.data.nbytes for blocks in held for block in blocks if block.on_device == on_device}.values())

    def append(self, seq: int, rows: Tensor, *, non_blocking: bool = False) -> None:
        """Append rows [H, n, 2, D] of any device to a sequence.

        A block holds the tokens of each head contiguously.

        non_blocking: only enqueue the copy from the device on the current stream; the caller waits before anyone reads the
            rows.
        """
        start, n, rows = self._length[seq], rows.shape[1], self.format.encode(rows)
        self.claim([(seq, start + n)])
        for number, offset, done, take in self._pieces(start, start + n):
            block, source = self._writable(seq, number), rows[:, done : done + take]
            if take == self.block_size:
                block.copy_(source, non_blocking=non_blocking)
            else:  # a part of a block is one contiguous piece a head
                for h in range(self.kv_heads):
                    block[h, offset : offset + take].copy_(source[h], non_blocking=non_blocking)
        self._length[seq] = start + n

    def extend(self, ends: Iterable[tuple[int, int]]) -> None:
        """Set the lengths of sequences: (sequence, tokens). The new rows are being copied to the space that claim() allocated."""
        for seq, end in ends:
            self._length[seq] = end

    def arrive(self, copied: torch.cuda.Event, *, ordered: bool) -> None:
        """Record that all rows appended so far are in place when `copied` passes.

        ordered: whether `copied` was recorded on the current stream.
        """
        self.arriving, self.ordered = copied, ordered

    def wait(self) -> None:
        """Wait on the host until all rows are in place."""
        if self.arriving is not None:
            self.arriving.synchronize()
            self.arriving, self.ordered = None, True

    def order(self, device: torch.device) -> None:
        """Make the device's current stream wait until all rows are in place. The host does not wait."""
        if self.arriving is not None and not self.ordered:
            torch.cuda.current_stream(device).wait_event(self.arriving)
            self.ordered = True

    def lacks(self, ends: Iterable[tuple[int, int]]) -> int:
        """Return the number of blocks that sequences lack: (sequence, tokens)."""
        return sum(max(0, -(-end // self.block_size) - len(self.table.blocks[seq])) for seq, end in ends)

    def claim(self, ends: Sequence[tuple[int, int]]) -> None:
        """Allocate the blocks of sequences: (sequence, tokens). Shared blocks that will be written are copied."""
        size, table = self.block_size, self.table.blocks
        lacks = {seq: lack for seq, end in ends if (lack := -(-end // size) - len(table[seq])) > 0}
        if count := sum(lacks.values()):
            self.memory.prepare(max(0, count - self.room), self.block_bytes, pinned=self.pinned)
            made = iter(self._new_blocks(count))
            for seq, lack in lacks.items():
                table[seq].extend(islice(made, lack))
            self.table.changed(*lacks)
        for seq, end in ends:
            for number in range(self._length[seq] // size, -(-end // size)):
                block = table[seq][number]
                if block.moving is not None or block.owners > 1:
                    self._writable(seq, number)

    def replace(self, old: Block, new: Block) -> bool:
        """Replace a block by its copy in every sequence and prefix. Returns whether any held it."""
        places = [(seq, i) for seq, blocks in enumerate(self.table.blocks) for i, block in enumerate(blocks) if block is old]
        for seq, i in places:
            self.table.blocks[seq][i] = new
        kept = [key for key, block in self.kept.items() if block is old]
        self.kept.update((key, new) for key in kept)
        for _ in (*places, *kept):
            new.share()
            old.release()
        new.recalls = old.recalls
        if places or kept:
            self.table.changed(*(seq for seq, _ in places))
        return bool(places or kept)

    def reserved(self, seq: int) -> int:
        """Return the number of tokens that a sequence's blocks can hold. A sequence that the store does not have has no blocks."""
        return len(self.table.blocks[seq]) * self.block_size if seq < self.seqs else 0

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows start .. stop of a sequence as [H, stop - start, 2, D], possibly a view if one block holds them.

        The result is on the device if any of the rows lies there, else on the host.
        """
        if not 0 <= start <= stop <= self._length[seq]:
            raise IndexError(f"rows {start}..{stop} of sequence {seq}, which holds {self._length[seq]}")
        own, pieces = self.table.blocks[seq], self._pieces(start, stop)
        parts = [own[number].data[:, offset : offset + take] for number, offset, _, take in pieces]
        if not parts:
            return torch.empty((self.kv_heads, 0, 2, self.head_dim), dtype=self.dtype)
        devices = {part.device for part in parts}
        if len(devices) > 1:
            parts = [part.to(next(device for device in devices if device.type != "cpu")) for part in parts]
        return self.format.decode(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def gathers(self, seq: int, device: torch.device) -> Callable[[int, Tensor], None] | None:
        """Return a function (position, out) that copies a sequence's rows from `position` on to out [H, n, 2, D] with one
        kernel.

        The kernel runs on the current stream. Returns None unless all blocks of the sequence lie on a GPU, unquantized.
        """
        apart = device.type != "cuda" or not all(block.on_device for block in self.table.blocks[seq])
        if apart or self.format.fp8 or not HAS_TRITON:
            return None
        self.order(device)
        return partial(stream_rows, self.table.on(device)[seq], self.block_size)

    def read_keys(self, seq: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the keys [H, stop - start, D] of rows start .. stop of a sequence on `device`; see copy_keys."""
        out = torch.empty((1, self.kv_heads, stop - start, self.head_dim), dtype=self.dtype, device=device)
        self.copy_keys([seq], start, out)
        return out[0]

    def copy_keys(self, seqs: Sequence[int], start: int, out: Tensor) -> None:
        """Copy the keys of rows start .. start + n of `seqs` to out [R, H, n, D], each head contiguous.

        Rows may still be on their way to the host. A kernel on the current stream waits for them, or on a CPU this thread
        does.
        """
        stop = start + out.shape[2]
        for seq in seqs:
            if not 0 <= start <= stop <= self._length[seq]:
                raise IndexError(f"rows {start}..{stop} of sequence {seq}, which holds {self._length[seq]}")
        if HAS_TRITON and out.is_cuda and self.pinned:
            if self.arriving is not None:
                torch.cuda.current_stream(out.device).wait_event(self.arriving)
            blocks = -(-stop // self.block_size)
            table = self.table.on_cpu()[list(seqs), :blocks]
            stream_keys(sent(table, out.device), self.block_size, start, out, self.format)
        else:
            if self.arriving is not None:
                self.arriving.synchronize()
            for seq, keys in zip(seqs, out, strict=True):
                stream_definition([block.data for block in self.table.blocks[seq]], start, keys, self.format)

    def gather(self, rows: Tensor, out: Tensor) -> tuple[int, Tensor]:
        """Wait for all rows, and gather rows [B, H, M] int32 of the first B sequences as `kvthaw.native.gather_rows` does."""
        self.wait()
        return gather_rows(self.table.on_cpu()[: len(rows)], self.block_size, rows, out)

    def truncate(self, seq: int, length: int) -> None:
        """Drop rows >= length, and the blocks that are no longer needed."""
        if length > self._length[seq]:
            raise IndexError(f"sequence {seq} holds {self._length[seq]} rows, fewer than {length}")
        keep = -(-length // self.block_size)
        for block in self.table.blocks[seq][keep:]:
            block.recalls = 0.0  # by its other holders
            block.release()
        del self.table.blocks[seq][keep:]
        self._length[seq] = length
        self.table.changed(seq)

    def view(self) -> HostStore:
        """Return a store without rows that a thread of its own may read while this one changes; see hold()."""
        twin = copy.copy(self)
        twin.table, twin._length, twin.arriving = BlockTable(self.seqs, self.block_size), [0] * self.seqs, None
        return twin

    def hold(self, seq: int, blocks: Sequence[Block], length: int) -> None:
        """Replace the rows of a sequence of a view by `length` rows in `blocks` of another store, which owns them."""
        self.table.blocks[seq], self._length[seq] = list(blocks), length
        self.table.changed(seq)

    def blocks(self, seq: int) -> list[Block]:
        """Return the blocks of a sequence. Their rows stay where they are while the list is held."""
        return list(self.table.blocks[seq])

    def adopt(self, seq: int, blocks: Sequence[Block], length: int) -> None:
        """Start a sequence with the first `length` rows of `blocks`, which are shared until it writes into one."""
        before, self.table.blocks[seq] = self.table.blocks[seq], [block.share() for block in blocks]
        for block in before:
            block.release()
        self._length[seq] = length
        self.table.changed(seq)

    def move(self, moves: Moves) -> None:
        """Move the rows of sequences to empty slots. No row is copied."""
        self.table.move(moves)
        for seq, to in moves.slots.items():
            self._length[seq], self._length[to] = 0, self._length[seq]

    def reorder(self, seqs: Sequence[int]) -> None:
        """Make sequence i hold the rows of the former sequence seqs[i]. Blocks are shared until a sequence writes."""
        blocks = [[block.share() for block in self.table.blocks[seq]] for seq in seqs]
        self.release()
        self.table.blocks, self._length = blocks, [self._length[seq] for seq in seqs]
        self.table.changed(*range(self.seqs))

    def release(self) -> None:
        """Release all blocks of the store."""
        for block in chain.from_iterable(self.table.blocks):
            block.release()
        self.table.blocks = []

    def __del__(self) -> None:
        self.release()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (number, offset, done, take) for each block that has some of the rows start .. stop.

        The block's rows offset .. offset + take are rows start + done and on.
        """
        at = start
        while at < stop:
            number, offset = divmod(at, self.block_size)
            take = min(stop - at, self.block_size - offset)
            yield number, offset, at - start, take
            at += take

    def _writable(self, seq: int, number: int) -> Tensor:
        block = self.table.blocks[seq][number]
        block.moving = None  # a copy under way lacks what is written now
        if block.owners > 1:
            (copy,) = self._new_blocks(1)
            copy.data.copy_(block.data)
            block.release()
            block = self.table.blocks[seq][number] = copy
            self.table.changed(seq)
        return block.data
