"""Bind a process to the CPU cores near its GPU, so that its threads and host memory are there too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def cores_near(gpu: int, system: Path = Path("/sys")) -> list[int]:
    """Return the cores on a GPU's NUMA node that this process may use.

    Returns all cores that it may use if there is no GPU or the system does not tell. Returns none if the system cannot bind
    processes to cores.

    system: the sysfs folder.
    """
    if sys.platform != "linux":
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return allowed
    found: Any = torch.cuda.get_device_properties(gpu)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    local = set[int]()
    with suppress(OSError, ValueError):
        local.update(_listed(system / "bus/pci/devices" / address / "local_cpulist"))
    return [core for core in allowed if core in local] or allowed


def divide(cores: Sequence[list[int]], system: Path = Path("/sys")) -> list[list[int]]:
    """Divide cores among processes that may use the same ones. Each entry of `cores` is a process.

    Hyperthreads of one core go to one process if there are enough cores. If there are fewer cores than processes, a process
    gets none.

    system: as for cores_near.
    """
    shares = []
    for i, own in enumerate(cores):
        at, count = cores[:i].count(own), cores.count(own)
        groups = _siblings(own, system)
        if len(groups) < count:
            groups = [[core] for core in own]
        mine = groups[len(groups) * at // count : len(groups) * (at + 1) // count] if len(groups) >= count else []
        shares.append(sorted(core for group in mine for core in group))
    return shares


def _siblings(cores: Sequence[int], system: Path) -> list[list[int]]:
    """Group cores by physical core; each alone if the system does not tell."""
    groups = dict[int, list[int]]()
    for core in cores:
        first = core
        with suppress(OSError, ValueError):
            first = min(_listed(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        groups.setdefault(first, []).append(core)
    return list(groups.values())


def _listed(path: Path) -> list[int]:
    """Read a list of numbers such as "0-27,56-83"."""
    found = list[int]()
    for part in path.read_text().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """Context in which this thread, and threads that it starts, run on `cores`, and torch uses at most one thread per core.

    Memory that they pin or write first lies near the cores, as long as there is room. Does nothing without cores.
    """
    if not cores or sys.platform != "linux":
        yield
        return
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(min(threads, len(cores)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
