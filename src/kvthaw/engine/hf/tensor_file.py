"""Files of tensors in the safetensors format, with a checksum of their bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvthaw.errors import CacheError
from kvthaw.native import Checksum

PRIVATE = 0o600
"""Mode of a file with prompts, which only its owner may read."""
_PIECE = 4 << 20  # bytes that write() reads back at a time
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODE = re.compile(r"\(os error (\d+)\)")  # how safetensors names an error of the system


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous CPU tensors to a new file that only its owner may read, and sync it. Returns the checksum of its bytes.

    Raises OSError.
    """
    path.touch(PRIVATE)
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = int(found[1]) if (found := _CODE.search(str(error))) else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    with _opened(path) as file:
        os.fsync(file.fileno())
        digest, piece = Checksum(), torch.empty(_PIECE, dtype=torch.uint8, device="cpu")
        while digest.read(file.fileno(), memory(piece)) == len(piece):
            pass
        return digest.hexdigest()


class TensorFile:
    """A file that write() wrote, and the checksum that its bytes should have.

    kinds: the dtype and shape of each tensor, in the order in which they lie in the file.

    Raises CacheError if the file cannot be read or is not of this form.
    """

    def __init__(self, path: Path, checksum: str) -> None:
        self.path, self._checksum = path, checksum
        with self._errors(), _opened(path) as file:
            size = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(size)) if size < os.stat(path).st_size else {}
            found.pop("__metadata__", None)
            order = sorted(found, key=lambda name: int(found[name]["data_offsets"][1]))
            self.kinds = {name: (_DTYPES[found[name]["dtype"]], torch.Size(found[name]["shape"])) for name in order}
            at = [0, *accumulate(dtype.itemsize * shape.numel() for dtype, shape in self.kinds.values())]
            if [found[name]["data_offsets"] for name in order] != [list(pair) for pair in pairwise(at)]:
                raise ValueError("its tensors do not follow each other")
            self._head = 8 + size
            if os.stat(path).st_size != self._head + at[-1]:
                raise ValueError("it has another size")

    def read(self, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read all tensors. Raises CacheError unless the bytes have the checksum.

        places: parts of memory [N, 2], addresses and bytes, that a tensor is read into, one after the other. Returns the tensors
            without places.
        """
        made = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in self.kinds.items()
            if name not in places
        }
        head, digest = torch.empty(self._head, dtype=torch.uint8, device="cpu"), Checksum()
        parts = {name: places[name] if name in places else memory(made[name]) for name in self.kinds}
        with self._errors(), _opened(self.path) as file:
            for name, (dtype, shape) in self.kinds.items():
                if (left := dtype.itemsize * shape.numel() - int(parts[name][:, 1].sum())) != 0:
                    raise ValueError(f"{name} has {left} bytes more than its places")
            every = torch.cat([memory(head), *parts.values()])
            read = digest.read(file.fileno(), every)
            if read < int(every[:, 1].sum()) or file.read(1) or digest.hexdigest() != self._checksum:
                raise ValueError("it has other bytes")
        return made

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise CacheError for what is wrong with the file."""
        try:
            yield
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, RuntimeError):
            raise CacheError(f"{self.path.parent} is damaged: {self.path.name} is not what was saved") from None
        except OSError as error:
            raise CacheError(f"{self.path} cannot be read: {error.strerror}") from error


def memory(tensor: Tensor) -> Tensor:
    """Return the address and bytes of a contiguous tensor, [1, 2], which places of TensorFile.read() are."""
    return torch.tensor([[tensor.data_ptr(), tensor.nbytes]], device="cpu")


def _opened(path: Path) -> FileIO:
    """Open a regular file. Raises OSError for a pipe, before it would hang."""
    check_regular(path)
    return path.open("rb", buffering=0)


def check_regular(path: Path) -> None:
    """Raise OSError for what is no regular file, such as a pipe, on which a reader would hang."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
