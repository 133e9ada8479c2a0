"""Files of tensors in the safetensors format, with the SHA-256 of the written bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvthaw.cache.host_memory import as_bytes
from kvthaw.errors import CacheError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
PIECE = 64 << 20  # bytes hashed and written at once
PRIVATE = 0o600
"""Mode of a file with prompts, which only its owner may read."""
_HEADER = 100 << 20  # most bytes of a file's header


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous CPU tensors to a new file that only its owner may read, and sync it. Returns the SHA-256 of its bytes."""
    header, end = {}, 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # so that each is aligned
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes],
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "wb") as file:
        for data in (memoryview(len(text).to_bytes(8, "little") + text), *map(as_bytes, tensors.values())):
            for at in range(0, len(data), PIECE):
                digest.update(data[at : at + PIECE])
                file.write(data[at : at + PIECE])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class TensorFile:
    """The tensors of a memory-mapped file. check() verifies its content.

    Raises CacheError for any other file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, dict[str, Tensor]()
        try:
            self._data = torch.from_file(str(path), shared=False, size=regular_size(path), dtype=torch.uint8)
            start = 8 + min(int.from_bytes(bytes(as_bytes(self._data[:8])), "little"), _HEADER)
            for name, entry in json.loads(bytes(as_bytes(self._data[8:start]))).items():
                begin, end = entry["data_offsets"]
                own = self._data.narrow(0, start + begin, end - begin).view(_TYPES[entry["dtype"]])
                self.tensors[name] = own.view(entry["shape"])
        except FileNotFoundError:
            raise self._damaged() from None
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror}") from error
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise self._damaged() from None

    def check(self, sha256: str) -> None:
        """Raise CacheError unless the file's bytes have this SHA-256. Other threads run meanwhile."""
        if hashlib.sha256(as_bytes(self._data)).hexdigest() != sha256:
            raise self._damaged()

    def _damaged(self) -> CacheError:
        return CacheError(f"{self.path.parent} is damaged: {self.path.name} is not what was saved")


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises OSError for anything else, such as a pipe, on which a reader would hang."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found.st_size
