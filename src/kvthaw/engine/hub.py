"""Check the name of a model, and whether the Hugging Face hub is reachable, before anything slow is imported or tried."""

from __future__ import annotations

import struct
import urllib.error
import urllib.request
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from kvthaw.errors import ConfigError

SHIPPED = "shipped"
"""The name of the model that ships with the package."""
_READ_GGUF = ("gguf", "accelerate")
"""The packages that read .gguf files."""
_SPLIT = b"split.count"
_SECONDS = 3.0
"""Seconds that the hub has to answer, name resolution included. transformers itself tries for nearly a minute."""


def offline(name: str) -> bool:
    """Return whether a model must come from the hub's local cache, because the hub does not answer.

    False for the shipped model, folders and files. Raises ConfigError if the local cache does not hold the model.
    """
    if name == SHIPPED or is_path(name):
        return False
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT):
        return False
    if not Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").is_dir():
        raise ConfigError(f"model is {name!r}; no folder and no cached model has that name, and the hub cannot be reached")
    return True


def check_path(name: str) -> Path | None:
    """Return the folder or .gguf file of a model's name; None for "shipped" and ids on the hub.

    Raises ConfigError for a path without a model, and if a package that reads it is missing.
    """
    if name == SHIPPED or not is_path(name):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        files = sorted(path.glob("*.gguf"))
        hint = f"; name a file in it, such as {files[0].name}" if files else ""
        raise ConfigError(f"model is {name!r}; that folder holds no config.json{hint}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model is {name!r}; of files only .gguf ones can be loaded: name its folder instead")
        _check_gguf(path, name)
        return path
    if name.lower().endswith(".gguf"):
        raise ConfigError(f"model is {name!r}; there is no such file")
    raise ConfigError(f"model is {name!r}; there is no such folder")


def _check_gguf(path: Path, name: str) -> None:
    """Raise ConfigError for a file that is no complete model, and if a package that reads it is missing."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head[:4] != b"GGUF":
        raise ConfigError(f"model is {name!r}; that file is not in the GGUF format")
    if _parts(head) > 1:
        raise ConfigError(
            f"model is {name!r}; it is one of {_parts(head)} parts of a model: join them with llama-gguf-split --merge"
        )
    if missing := [package for package in _READ_GGUF if find_spec(package) is None]:
        lacks = " and ".join(missing)
        raise ConfigError(f"model is {name!r}; a .gguf file takes {lacks}, not installed: pip install 'kvthaw[gguf]'")


def _parts(head: bytes) -> int:
    """Return the number of files that a model was split into, from the key and its 16-bit value."""
    at = head.find(_SPLIT)
    if at < 0 or len(head) < at + len(_SPLIT) + 6:
        return 1
    count: int = struct.unpack_from("<H", head, at + len(_SPLIT) + 4)[0]
    return count


def is_path(name: str) -> bool:
    """Return whether a model's name is a path (a folder or a .gguf file, existing or not) rather than an id on the hub."""
    return (
        not name
        or name.lower().endswith(".gguf")
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or Path(name).exists()
    )


def display_name(name: str) -> str:
    """Return a model's name for results, without this machine's folders."""
    return Path(name).expanduser().resolve().name if name.startswith((".", "/", "~")) else name


@cache
def answers(endpoint: str) -> bool:
    """Return whether a server answers within _SECONDS."""
    found: list[bool] = []
    ask = Thread(target=lambda: found.append(_asked(endpoint)), daemon=True)
    ask.start()
    ask.join(_SECONDS)
    return found == [True]


def _asked(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in (403, 407)  # 403 and 407 come from a proxy
    except (OSError, ValueError):
        return False
    return True
