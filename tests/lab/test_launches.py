"""A step broken down by kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvthaw.kernels
import kvthaw_baselines.kernels
from lab.launches import KERNELS, launches, part_of, summary


def test_summary_is_of_one_step() -> None:
    found = summary([("add", 2.0), ("dot", 30.0), ("add", 4.0), ("dot", 34.0), ("copy", 1.0)], 2)
    assert found["launches"] == 2.5
    assert found["device_s"] == pytest.approx(35.5e-6)
    assert found["parts_s"] == {"other": pytest.approx(35.5e-6)}
    assert found["kernels"] == [
        {"name": "dot", "launches": 1.0, "us": 32.0},
        {"name": "add", "launches": 1.0, "us": 3.0},
        {"name": "copy", "launches": 0.5, "us": 0.5},
    ]


def test_every_kernel_that_is_named_is_one() -> None:
    source, others = (
        "".join(file.read_text() for file in Path(package.__path__[0]).glob("*.py"))
        for package in (kvthaw.kernels, kvthaw_baselines.kernels)
    )
    for names in KERNELS.values():
        for name in names:
            assert re.search(rf"@triton.jit(\([^)]*\))?[^\n]*\n\s+def {name}\(", source + others), name
    named = {name for names in KERNELS.values() for name in names}
    launched = set(re.findall(r"^\s+(?:\w+ = )?(_\w+)\[[^]]+\]\($", source, re.M)) | set(re.findall(r"\s(_\w+)\[\(", source))
    assert len(launched) > 20
    assert launched <= named


def test_kernels_belong_to_parts() -> None:
    names = ("_attend", "_uva_gather", "nvjet_tst_64x8", "triton_red_fused_mul", "Memcpy DtoD", "flash_fwd_kernel")
    assert [part_of(name) for name in names] == ["attention", "fetch", "weights", "other", "copies", "attention"]


@pytest.mark.gpu
def test_gpu_kernels_of_a_replay_are_seen() -> None:
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.mul_(1.5)
    found = launches(graph.replay)
    assert found["launches"] == 5
    assert found["kernels"][0]["launches"] == 5
    assert found["device_s"] > 0
