"""The CPU cores next to a GPU, for a process to run on: its threads and its host memory are there too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def cores_near(gpu: int, system: Path = Path("/sys")) -> list[int]:
    """Return the cores that this process may use and that are on the NUMA node of a GPU; all that it may use where there is no GPU
    or the system does not tell, none where it does not bind processes to cores. system: where Linux describes the machine."""
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
    """Divide cores among the processes that may use the same ones, hyperthreads of one core to one process if there are enough; a
    process gets none where there are fewer than processes. system: as for cores_near."""
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
    """Return cores by the physical core that they are hyperthreads of; alone where the system does not tell."""
    groups = dict[int, list[int]]()
    for core in cores:
        first = core
        with suppress(OSError, ValueError):
            first = min(_listed(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        groups.setdefault(first, []).append(core)
    return list(groups.values())


def _listed(path: Path) -> list[int]:
    """Read numbers such as "0-27,56-83"."""
    found = list[int]()
    for part in path.read_text().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """Have this thread, and those that it starts, run on some cores within it, and torch use as many threads; none: as before.
    Memory that they page-lock or write first lies beside the cores, as long as there is room."""
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
