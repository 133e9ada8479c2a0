"""What page.js does to the data, in Python."""

from __future__ import annotations

import base64
import zlib
from typing import Any


def ints(packed: dict[str, Any]) -> list[int]:
    flat, n = zlib.decompress(base64.b64decode(packed["data"])), packed["n"]
    return [sum(flat[p * n + i] << 8 * p for p in range(packed["planes"])) for i in range(n)]


def sets(packed: dict[str, Any], steps: int, beside: list[set[int]] | None = None) -> list[set[int]]:
    gaps, out = iter(ints(packed["gaps"])), list[set[int]]()
    for s, count in enumerate(ints(packed["counts"])):
        changed, at = set(), 0
        for _ in range(count):
            at += next(gaps)
            changed.add(at)
        assert len(changed) == count
        out.append(changed ^ (beside[s] if beside is not None else out[-1] if s % steps else set()))
    return out
