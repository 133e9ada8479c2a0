"""What the interpreter takes a GPU's compiler may refuse: kernels compiled for one, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from compiling import CASES

from kvthaw.kernels import HAS_TRITON

pytestmark = pytest.mark.slow


HERE = [case for case in CASES if case != "elsewhere"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script says of most cases."""
    return said_of("cuda:90", HERE, tmp_path_factory.mktemp("triton"))


def said_of(target: str, cases: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """What the script says, in a process of its own, for in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, script, target, *cases], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(
    not HAS_TRITON or find_spec("triton.backends.nvidia") is None, reason="Triton has no compiler for NVIDIA GPUs"
)
@pytest.mark.parametrize("case", HERE)
def test_kernels_compile_for_a_gpu(case: str, said: list[dict[str, Any]]) -> None:
    (line,) = (line for line in said if line["case"] == case)
    assert "error" not in line, line["error"]
    assert line["compiled"]


@pytest.mark.skipif(not HAS_TRITON or find_spec("triton.backends.amd") is None, reason="Triton has no compiler for AMD GPUs")
@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:75"])
def test_kernels_compile_where_instructions_are_missing(target: str, tmp_path: Path) -> None:
    (line,) = said_of(target, ["elsewhere"], tmp_path)
    assert "error" not in line, line["error"]
    assert {"_signs", "_rerank", "_assign", "_attend"} <= set(line["compiled"])


@pytest.mark.skipif(
    not HAS_TRITON or find_spec("triton.backends.nvidia") is None, reason="Triton has no compiler for NVIDIA GPUs"
)
def test_a_batch_needs_no_other_kernels_than_a_row(said: list[dict[str, Any]]) -> None:
    """Whatever its number of rows: those of the codes take a second."""
    for line in said:
        if line["case"] == "batches":
            assert set(line["kinds"]) == {"_encode", "_count"}
            assert set(line["kinds"].values()) == {1}, line["kinds"]


@pytest.mark.skipif(
    not HAS_TRITON or find_spec("triton.backends.nvidia") is None, reason="Triton has no compiler for NVIDIA GPUs"
)
def test_clusters_of_later_tokens_need_no_other_kernels_than_the_prompts(said: list[dict[str, Any]]) -> None:
    """Compiling one takes a third of a second, which a step in the middle of an answer would wait."""
    for line in said:
        if line["case"] == "clusters":
            assert set(line["kinds"]) == {"_direct", "_cover", "_assign", "_rank", "_sort", "_average"}
            assert set(line["kinds"].values()) == {1}, line["kinds"]
