"""Benchmarks as their authors publish them, for models that can answer them: prompts, metrics, and what reads their files."""

from __future__ import annotations

from .base import Benchmark, Item, Plan
from .competition import AIME24, AIME25, MATH500
from .gpqa import GPQA
from .gsm8k import GSM8K
from .longbench import V1
from .longbench_v2 import V2
from .longgenbench import LONGGEN

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (GSM8K, MATH500, AIME24, AIME25, *GPQA, *V1, *V2, *LONGGEN)
}
"""Name -> benchmark. A task in TASKS is made at any length; one of these is read from a file that somebody published."""

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Plan"]
