"""What must run on CPU threads, in C++: DCI-trees, gathering of rows, and reading of files with their checksums.

The functions here check tensors and hand their addresses over; the extension neither checks nor keeps them. Work runs on one
pool of threads that is made on first use and stays; `threads` limits how many of them a call uses, 0 being one for each core.
No call holds the GIL while it works. isa chooses the instruction set; without it the best of this machine is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import NotBuiltError

try:
    import kvthaw.native._native as _native
    from kvthaw.native._native import Effort, Forest, TreeSettings, cores
except ImportError as error:
    raise NotBuiltError(
        f"kvthaw's C++ part is not built for this Python ({error}); `make demo` builds it, and so does "
        "`pip install --no-build-isolation -e .` with the packages of constraints.txt"
    ) from error

__all__ = [
    "DTYPES",
    "ELEMENTS",
    "Checksum",
    "Effort",
    "Forest",
    "Isa",
    "TreeSettings",
    "admit",
    "cores",
    "gather_rows",
    "isa_code",
    "isas",
]


class Checksum:
    """XXH64 of bytes, 10 GB/s a core, to find damage. It is used as hashlib's objects are."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._native = _native.Checksum()
        self._native.update(data)

    def update(self, data: bytes | memoryview) -> None:
        """Add contiguous bytes."""
        self._native.update(data)

    def read(self, file: int, parts: Tensor) -> int:
        """Read a file from its position into parts of memory, one after the other, and add what was read.

        One call for a whole file takes Python's lock twice. Returns the bytes read, fewer if the file ends before the last part.
        Raises OSError.

        file: its descriptor.
        parts: [N, 2] int64, addresses and bytes of memory that the caller may write to.
        """
        done, error = self._native.read(file, _check("parts", parts, torch.int64, (len(parts), 2)), len(parts))
        if error:
            raise OSError(error, os.strerror(error))
        return done

    def digest(self) -> bytes:
        """Return the checksum of all bytes so far."""
        return self._native.digest().to_bytes(8, "big")

    def hexdigest(self) -> str:
        """Return it as 16 hexadecimal digits."""
        return self.digest().hex()


Isa = Literal["scalar", "avx2", "avx512", "neon"]
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 4}
"""Stored dtypes that a tree reads, by the extension's numbers. It computes in float32 whatever they are."""
ELEMENTS = DTYPES | {torch.float8_e4m3fn: 5}
"""The same, with rows of 8 bits; see `kvthaw.kernels.row_format`."""


def isas() -> list[Isa]:
    """Return the instruction sets that this machine and build have, in the order of Isa."""
    return [name for code, name in enumerate(get_args(Isa)) if _native.has_isa(code)]


def isa_code(isa: Isa | None) -> int:
    """Return the extension's number of an instruction set, -1 for None. Raises ValueError for one that this machine lacks."""
    if isa is None:
        return -1
    if isa not in isas():
        raise ValueError(f"isa is {isa!r}; this machine has {', '.join(isas())}")
    return get_args(Isa).index(isa)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the address of a tensor. Raises ValueError unless it is contiguous on the host, with this dtype and shape."""
    if (
        tensor.dtype != dtype
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tuple(tensor.shape) != tuple(shape)
    ):
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} is {found}; it must be contiguous {dtype} {list(shape)} on the CPU")
    return tensor.data_ptr()


def gather_rows(addresses: Tensor, block_size: int, rows: Tensor, out: Tensor, *, threads: int = 0) -> tuple[int, Tensor]:
    """Gather scattered rows, K and V, for one copy to the device.

    addresses: [B, blocks] int64, a HostStore's tables, 0 padded.
    rows: [B, H, M] int32 positions, -1 skips.
    out: [N, *tail] in the store's format, on the host (pinned for a copy), with N at least the number of rows wanted. Later
        rows stay unchanged.

    Returns the number n of rows wanted, and the flat index of each into rows, [n] int64. Raises ValueError if out is too
    small.
    """
    batch, heads, width = rows.shape
    bases = _check("addresses", addresses, torch.int64, (batch, addresses.shape[1]))
    source = _check("rows", rows, torch.int32, rows.shape)
    if out.dim() < 2 or out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)} on {out.device}; it must be contiguous, stored rows on the CPU")
    if out.shape[0] < rows.numel() and out.shape[0] < int((rows >= 0).sum()):
        raise ValueError(f"out has room for {out.shape[0]} rows; {int((rows >= 0).sum())} are wanted")
    row_bytes = out.stride(0) * out.element_size()
    where = torch.empty(rows.numel(), dtype=torch.int64)
    count = _native.gather_rows(
        bases, addresses.shape[1], block_size, row_bytes, batch, heads, width, source, out.data_ptr(), where.data_ptr(), threads
    )
    return count, where[:count]


def admit(
    rows: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    used: Tensor,
    counts: Tensor,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign slots on the host, as `kvthaw.kernels.admit.admit` does. Leaves the last columns of row_slot and slot_row
    unchanged.

    out: tensors that receive slots, fetch and live; None allocates them.
    """
    if out is None:
        places = rows.new_empty((*rows.shape[:2], slot_row.shape[2] - 1), dtype=torch.bool)
        out = torch.empty_like(rows), torch.empty_like(rows), places
    admission(rows, row_slot, slot_row, used, counts, out)()
    return out


def admission(
    rows: Tensor, row_slot: Tensor, slot_row: Tensor, used: Tensor, counts: Tensor, out: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], None]:
    """Return a function that does what admit() does, with the tensors' content at the time of its call.

    The caller keeps the tensors alive.
    """
    seqs, heads, width = rows.shape
    capacity, places = row_slot.shape[2] - 1, slot_row.shape[2] - 1
    if width > places:
        raise ValueError(f"{width} rows do not fit into {places} slots")
    tables = (
        _check("row_slot", row_slot, torch.int32, (seqs, heads, capacity + 1)),
        _check("slot_row", slot_row, torch.int32, (seqs, heads, places + 1)),
        _check("used", used, torch.int32, (seqs, heads, places + 1)),
        _check("counts", counts, torch.int64, (4,)),
    )
    slots, fetch, live = out
    outs = (
        _check("slots", slots, torch.int32, rows.shape),
        _check("fetch", fetch, torch.int32, rows.shape),
        _check("live", live, torch.bool, (seqs, heads, places)),
    )
    source = _check("rows", rows, torch.int32, rows.shape)
    return partial(_native.admit, seqs * heads, width, capacity, places, source, *tables, *outs)
