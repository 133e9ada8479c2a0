"""A file for blocks of KV that do not fit in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw.errors import CacheError

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Error numbers that the system returns when a disk is full."""
_AT_ONCE = 8  # blocks written or read at a time


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of the file: its number, and the SHA-256 of each tensor in it."""

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
        return Slot(number, digests)

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
        data, done = _bytes(tensor), 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at + done)
        return hashlib.sha256(data).digest()

    def _read(self, at: int, tensor: Tensor) -> bytes:
        data, done = _bytes(tensor), 0
        while done < len(data) and (more := os.preadv(self._file, [data[done:]], at + done)):
            done += more
        return hashlib.sha256(data[:done]).digest()


def _bytes(tensor: Tensor) -> memoryview:
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(data)
