"""Processes of a split model run on the cores next to their GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvthaw.engine.cores import bound, cores_near, divide

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind processes to cores")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four cores each, of which core 7 is not ours; GPUs 0 and 2 lie on the first, 1 and 3 on the second."""
    cores = ["0-1,4-5\n", "2-3,6-7\n", "0-1,4-5\n", "2-3,6-7\n", "\n", "8-9\n"]
    for bus, text in enumerate(cores):
        folder = tmp_path / "bus/pci/devices" / f"0001:{0xA0 + bus:02x}:0b.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(text)
    ids = {"pci_domain_id": 1, "pci_device_id": 11}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(pci_bus_id=0xA0 + gpu, **ids))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6})
    return tmp_path


@on_linux
def test_the_processes_of_gpus_on_one_node_divide_its_cores(machine: Path) -> None:
    cores = [cores_near(gpu, machine) for gpu in range(4)]
    assert cores == [[0, 1, 4, 5], [2, 3, 6]] * 2
    assert divide(cores) == [[0, 1], [2], [4, 5], [3, 6]]


@on_linux
@pytest.mark.parametrize("gpu", [4, 5, 6])
def test_a_gpu_of_no_node_of_ours_may_use_all_cores(machine: Path, gpu: int) -> None:
    assert cores_near(gpu, machine) == [0, 1, 2, 3, 4, 5, 6]


def test_fewer_cores_than_processes_are_not_divided() -> None:
    assert divide([[3], [3]]) == [[], []]
    assert divide([[], []]) == [[], []]


@on_linux
def test_a_process_is_bound_within_the_context_alone() -> None:
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    with bound([core]):
        assert os.sched_getaffinity(0) == {core}
        assert torch.get_num_threads() == 1
    with bound([]):
        assert os.sched_getaffinity(0) == before


@pytest.mark.gpu
def test_gpu_tells_its_cores() -> None:
    cores = cores_near(0)
    assert cores
    assert set(cores) <= os.sched_getaffinity(0)
