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
    """Two nodes of two physical cores each, i and i + 4 the hyperthreads of one; core 7 is not ours. GPUs 0 and 2 lie on the
    first, 1 and 3 on the second."""
    cores = ["0-1,4-5\n", "2-3,6-7\n", "0-1,4-5\n", "2-3,6-7\n", "\n", "8-9\n"]
    for bus, text in enumerate(cores):
        folder = tmp_path / "bus/pci/devices" / f"0001:{0xA0 + bus:02x}:0b.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(text)
    for core in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    ids = {"pci_domain_id": 1, "pci_device_id": 11}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(pci_bus_id=0xA0 + gpu, **ids))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6})
    return tmp_path


@on_linux
def test_the_processes_of_gpus_on_one_node_divide_its_cores(machine: Path) -> None:
    cores = [cores_near(gpu, machine) for gpu in range(4)]
    assert cores == [[0, 1, 4, 5], [2, 3, 6]] * 2
    assert divide(cores, machine) == [[0, 4], [2, 6], [1, 5], [3]]
    assert divide([[0, 1, 4, 5]] * 3, machine) == [[0], [1], [4, 5]], "fewer physical cores than processes"


def test_hyperthreads_that_are_numbered_side_by_side_stay_together(tmp_path: Path) -> None:
    for core in range(6):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core // 2 * 2}-{core // 2 * 2 + 1}\n")
    assert divide([[0, 1, 2, 3, 4, 5]] * 2, tmp_path) == [[0, 1], [2, 3, 4, 5]]
    assert divide([[0, 1, 2, 3, 4, 5]] * 2, tmp_path / "tells nothing") == [[0, 1, 2], [3, 4, 5]]


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
