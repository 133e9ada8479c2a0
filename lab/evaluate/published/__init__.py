"""Benchmarks as their authors publish them, for models that can answer them: prompts, metrics, and what reads their files."""

from __future__ import annotations

from .base import Benchmark, Generation, Item
from .competition import AIME24, AIME25, MATH500
from .gpqa import GPQA
from .gsm8k import GSM8K
from .longbench import CHINESE, V1
from .longbench_v2 import V2
from .longgenbench import LONGGEN

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (GSM8K, MATH500, AIME24, AIME25, *GPQA, *V1, *V2, *LONGGEN)
}
"""Name -> benchmark. A task in TASKS is made at any length; one of these is read from a file that somebody published."""
FAMILIES: dict[str, tuple[Benchmark, ...]] = {
    "longbench": V1,
    "longbench_en": tuple(one for one in V1 if one.dataset not in CHINESE),
    "aime": (AIME24, AIME25),
    "gpqa": GPQA,
    "longgenbench": LONGGEN,
}
"""Families: names of several benchmarks. Their mean is reported, too."""


def benchmarks(name: str) -> tuple[Benchmark, ...]:
    """Return the benchmarks of a name or family, where "-" equals "_"; empty for an unknown name."""
    name = name.strip().replace("-", "_")
    return FAMILIES.get(name) or ((BENCHMARKS[name],) if name in BENCHMARKS else ())


__all__ = ["BENCHMARKS", "FAMILIES", "Benchmark", "Generation", "Item", "benchmarks"]
