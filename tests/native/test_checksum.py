"""Checksums of files, and reading files into memory with them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from kvthaw.engine.hf.tensor_file import memory
from kvthaw.native import Checksum

KNOWN = {
    0: "ef46db3751d8e999", 3: "e5c7bb4533bc65dd", 14: "5cda8b69bbfc1d45", 32: "cbf59c5116ff32b4", 101: "e99038495f85381e",
}  # fmt: skip
"""XXH64 of the bytes 0, 1, 2, ..., by xxhash 4.1.0."""


def test_known_sums() -> None:
    for size, expected in KNOWN.items():
        assert Checksum(bytes(range(size))).hexdigest() == expected


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up(seed: int) -> None:
    rng = random.Random(seed)
    data, found, at = rng.randbytes(rng.choice((1, 31, 32, 33, 500, 4099))), Checksum(), 0
    while at < len(data):
        size = rng.randint(0, 40)
        found.update(data[at : at + size])
        at += size
    assert found.digest() == Checksum(data).digest()
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert Checksum(bytes(flipped)).digest() != found.digest()


def test_a_file_is_read_into_parts(tmp_path: Path) -> None:
    data = random.Random(0).randbytes((5 << 20) + 3)
    (tmp_path / "file").write_bytes(data)
    sizes = [0, 8, 1, 3 << 20, (2 << 20) - 9, 3]
    made, whole = [torch.zeros(size, dtype=torch.uint8) for size in sizes], Checksum(data).digest()
    parts = torch.cat([memory(part) for part in made])
    with (tmp_path / "file").open("rb", buffering=0) as file:
        found = Checksum()
        assert found.read(file.fileno(), parts) == len(data)
        assert (bytes(torch.cat(made).numpy()), found.digest()) == (data, whole)
        assert Checksum().read(file.fileno(), parts) == 0, "its end"
        file.seek(8)
        longer = torch.zeros(len(data), dtype=torch.uint8)
        assert Checksum().read(file.fileno(), memory(longer)) == len(data) - 8
        assert bytes(longer[:-8].numpy()) == data[8:]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            Checksum().read(folder, memory(torch.zeros(4)))
    finally:
        os.close(folder)
    with pytest.raises(BufferError):
        Checksum().update(memoryview(bytearray(9))[::2])
