"""Files of tensors in the safetensors format, with the SHA-256 of their bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvthaw.errors import CacheError

PRIVATE = 0o600
"""Mode of a file with prompts, which only its owner may read."""
_CODE = re.compile(r"\(os error (\d+)\)")  # how safetensors names an error of the system


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous CPU tensors to a new file that only its owner may read, and sync it. Returns the SHA-256 of its bytes.

    Raises OSError.
    """
    path.touch(PRIVATE)
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = int(found[1]) if (found := _CODE.search(str(error))) else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, sha256: str) -> dict[str, Tensor]:
    """Return the tensors of a file, memory-mapped. Raises CacheError unless the file's bytes have this SHA-256."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        if same:
            with safe_open(path, "pt") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # it is no dict
    except (FileNotFoundError, SafetensorError):
        pass
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    raise CacheError(f"{path.parent} is damaged: {path.name} is not what was saved")


def check_regular(path: Path) -> None:
    """Raise OSError for what is no regular file, such as a pipe, on which a reader would hang."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
