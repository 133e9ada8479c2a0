"""Files of tensors in the format of safetensors, with the SHA-256 of what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
_PIECE = 64 << 20  # bytes hashed and written at once


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous tensors of the CPU to a new file and sync it. Returns the SHA-256 of its bytes."""
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
    with path.open("wb") as file:
        for data in (memoryview(len(text).to_bytes(8, "little") + text), *map(_bytes, tensors.values())):
            for at in range(0, len(data), _PIECE):
                digest.update(data[at : at + _PIECE])
                file.write(data[at : at + _PIECE])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read(path: Path, sha256: str) -> dict[str, Tensor]:
    """Return the tensors of a file, which lie in its pages in memory. Raises CacheError unless it is the file that was written."""
    try:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError):
        data = torch.empty(0, dtype=torch.uint8)
    if hashlib.sha256(_bytes(data)).hexdigest() != sha256:
        raise CacheError(f"{path.parent} is damaged: {path.name} is not what was saved")
    start = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    found = {}
    for name, entry in json.loads(bytes(data[8:start].tolist())).items():
        begin, end = entry["data_offsets"]
        own = data[start + begin : start + end].view(_TYPES[entry["dtype"]])
        found[name] = own.view(entry["shape"])
    return found


def _bytes(tensor: Tensor) -> memoryview:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)
