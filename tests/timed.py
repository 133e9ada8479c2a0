"""Records of the decode benchmark, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvthaw.bench.shapes import sizes
from kvthaw.evaluate.results import Record, ResultsFile
from lab.bench.check import Checks
from lab.bench.settings import ShapeSetting, grid
from lab.bench.shaped import ShapeBench


def tinier(heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> dict[str, Any]:
    """Return a shape so small that a benchmark of it takes a second."""
    return sizes("llama", 64, 96, 2, heads, kv_heads, head_dim, 128)


def settings(*methods: str, device: str = "cpu", **asked: Any) -> list[ShapeSetting]:
    """Settings of methods, of a tiny shape and short unless asked otherwise."""
    sizes = {name: asked.pop(name, default) for name, default in (("lengths", [160]), ("batches", [1]), ("steps", ["eager"]))}
    wanted = {"shape": "tiny", "budget": 64, "retrieved": None, "dense_layers": None, "new_tokens": 20, "seed": 0}
    return grid(methods, sizes["lengths"], sizes["batches"], sizes["steps"], device=device, **{**wanted, **asked})


class _Unchecked(Checks):
    """Lets every setting pass."""

    def __call__(self, setting: ShapeSetting) -> None:
        return None


class Unchecked(ShapeBench):
    """Times without the checks before, which have tests of their own."""

    checks = _Unchecked


def measured(
    *methods: str, of: type[ShapeBench] = ShapeBench, out: Path | None = None, how: Any = None, **asked: Any
) -> list[Record]:
    """The records of methods. Raises what a setting failed with."""
    bench = of(ResultsFile(out), commit="abc", **(how or {}))
    records = bench.run(settings(*methods, **asked))
    bench.judge()
    return records
