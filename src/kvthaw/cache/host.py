"""The frozen rows of a layer: an append-only store in blocks of host memory, some of them on the device.

A row is one token of one KV head, its K then its V, stored as `RowFormat` says. Rows lie in token order in blocks of [H, E,
*tail], which are pinned if there is a GPU. Rows are never rewritten. Sequences with a common prefix (beams, repeated
prompts) therefore share blocks. A block is copied only when a sequence writes into a shared one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.block_table import BlockTable
from kvthaw.cache.host_memory import Block, BlockAllocator, HostMemory
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import sent
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.stream_keys import definition as stream_definition
from kvthaw.kernels.stream_keys import stream_keys, stream_rows
from kvthaw.kernels.uva_gather import COUNTERS
from kvthaw.native import gather_rows


class HostStore:
    """Rows of one layer, by sequence and position.

    Rows 0 .. length(seq) - 1 of a sequence are readable. Every block is one contiguous tensor. Row (h, t) begins (h * E + t
    % E) * row_bytes after address `table.row(seq)[t // E]`.

    block_size: E, tokens per block.
    table: the blocks of each sequence.
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
        shape = kv_heads, block_size, *format.tail
        self.allocator = BlockAllocator(memory or HostMemory(), shape, format.stored, pinned=pinned)
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
    def pinned(self) -> bool:
        """Whether blocks are pinned, so that kernels can read them."""
        return self.allocator.pinned

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
        self.claim(seq, start + n)
        for number, offset, done, take in self._pieces(start, start + n):
            block, source = self._writable(seq, number), rows[:, done : done + take]
            if take == self.block_size:
                block.copy_(source, non_blocking=non_blocking)
            else:  # a part of a block is one contiguous piece a head
                for h in range(self.kv_heads):
                    block[h, offset : offset + take].copy_(source[h], non_blocking=non_blocking)
        self._length[seq] = start + n

    def extend(self, seq: int, length: int) -> None:
        """Set the length of a sequence to `length` tokens. The new rows are being copied to the space that claim() allocated."""
        self._length[seq] = length

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

    def claim(self, seq: int, length: int) -> None:
        """Allocate the blocks for `length` tokens of a sequence. Shared blocks that will be written are copied."""
        blocks = self.table.blocks[seq]
        if (lacking := -(-length // self.block_size) - len(blocks)) > 0:
            self.allocator.prepare(lacking)
        while len(blocks) * self.block_size < length:
            blocks.append(self.allocator.new().share())
            self.table.changed(seq)
        for number in range(self._length[seq] // self.block_size, -(-length // self.block_size)):
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
        """Wait until all rows are in place, and gather rows [B, H, M] int32 of the first B sequences in stored form, as
        `kvthaw.native.gather_rows` does."""
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
            copy = self.allocator.new().share()
            copy.data.copy_(block.data)
            block.release()
            block = self.table.blocks[seq][number] = copy
            self.table.changed(seq)
        return block.data
