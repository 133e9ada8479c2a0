"""What the interpreter takes a GPU's compiler may refuse: kernels compiled for one, without one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from compiling import CASES, SHARED

from kvthaw import kernels
from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines import kernels as baselines

pytestmark = pytest.mark.slow


HERE = [case for case in CASES if case not in ("elsewhere", "large")]
TARGETS = {"cuda:90": HERE, "cuda:89": ["large"], "cuda:75": ["elsewhere"], "hip:gfx942": ["elsewhere"]}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the script says for each target that there is a compiler for, in a process of its own, for in this one Triton
    interprets."""
    targets = [f"{target}={','.join(cases)}" for target, cases in TARGETS.items() if has_compiler(target)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run([sys.executable, script, *targets], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {target: [line for line in lines if line["target"] == target] for target in TARGETS}


def has_compiler(target: str) -> bool:
    return HAS_TRITON and find_spec(f"triton.backends.{'nvidia' if target.startswith('cuda') else 'amd'}") is not None


for_nvidia = pytest.mark.skipif(not has_compiler("cuda:90"), reason="Triton has no compiler for NVIDIA GPUs")


@for_nvidia
@pytest.mark.parametrize("case", HERE)
def test_kernels_compile_for_a_gpu(case: str, said: dict[str, list[dict[str, Any]]]) -> None:
    (line,) = (line for line in said["cuda:90"] if line["case"] == case)
    assert "error" not in line, line["error"]
    assert line["compiled"]


@for_nvidia
def test_every_kernel_is_in_a_case(said: dict[str, list[dict[str, Any]]]) -> None:
    launched = {
        node.func.value.id
        for package in (kernels, baselines)
        for path in Path(package.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
        if node.func.value.id.startswith("_")
    }
    assert len(launched) > 30
    assert launched - {name for line in said["cuda:90"] for name in line["compiled"]} == set()


@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:75"])
def test_kernels_compile_where_instructions_are_missing(target: str, said: dict[str, list[dict[str, Any]]]) -> None:
    if not has_compiler(target):
        pytest.skip("Triton has no compiler for this target")
    (line,) = said[target]
    assert "error" not in line, line["error"]
    assert {"_signs", "_rerank", "_assign", "_attend"} <= set(line["compiled"])


@for_nvidia
def test_attention_fits_in_the_shared_memory_of_smaller_gpus(said: dict[str, list[dict[str, Any]]]) -> None:
    """Over rows of 8 bits beside others it took 136 KiB everywhere, more than a GPU for workstations has."""
    (line,) = said["cuda:89"]
    assert "error" not in line, line["error"]
    assert 0 < line["shared"]["_attend"] <= SHARED["cuda:89"]


@for_nvidia
def test_a_batch_needs_no_other_kernels_than_a_row(said: dict[str, list[dict[str, Any]]]) -> None:
    """Whatever its number of rows: those of the codes take a second."""
    for line in said["cuda:90"]:
        if line["case"] == "batches":
            assert line["kinds"] == {"_encode": 2, "_count": 1}, line["kinds"]  # two forms of codes


@for_nvidia
def test_clusters_of_later_tokens_need_no_other_kernels_than_the_prompts(said: dict[str, list[dict[str, Any]]]) -> None:
    """Compiling one takes a third of a second, which a step in the middle of an answer would wait."""
    for line in said["cuda:90"]:
        if line["case"] == "clusters":
            assert set(line["kinds"]) == {"_direct", "_cover", "_assign", "_rank", "_sort", "_average"}
            assert set(line["kinds"].values()) == {1}, line["kinds"]


@for_nvidia
def test_a_chunk_of_any_length_needs_no_other_kernel(said: dict[str, list[dict[str, Any]]]) -> None:
    """A prompt's last one had 11 tokens, where all before had been multiples of 16."""
    for line in said["cuda:90"]:
        if line["case"] == "chunks":
            assert line["kinds"] == {"_merge_parts": 1}
