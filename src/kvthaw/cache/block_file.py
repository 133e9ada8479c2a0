"""A file for blocks of KV that memory has no room for."""

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
"""What the system says where a disk has no room."""
_AT_ONCE = 8  # blocks written or read at a time


@dataclass(frozen=True, slots=True)
class Slot:
    """Where tensors lie in the file, and the SHA-256 of each."""

    number: int
    digests: Sequence[bytes]


class BlockFile:
    """Slots of one size in a file without a name, which the system deletes with the process, however that ends.

    limit: the most bytes; None: as many as the disk gives. size: bytes of a slot, known with the first tensors.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        """Raises OSError where no file can be made in the folder, which is made if it is not there."""
        folder.mkdir(0o700, parents=True, exist_ok=True)  # names of kept documents are in it too
        self.folder, self.limit, self.size = folder, limit, 0
        self._file, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._file).atexit = False
        os.unlink(name)
        self._free: list[int] = []
        self._slots = 0

    def write(self, tensors: Sequence[Tensor]) -> Slot:
        """Write tensors, of any device, to a free slot. Raises OSError where the disk, or the limit, has no room."""
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
        """Read what was written into tensors of the host. Raises CacheError where it is not there any more."""
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
