"""What every benchmark says beside its numbers: the machine, the versions, the commit."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


def provenance(commit: str | None = None) -> dict[str, Any]:
    """GPU or CPU, versions and commit; commit None asks git, which may not know."""
    cuda = torch.cuda.is_available()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit or _git_commit(),
    }


def bandwidths(device: torch.device) -> dict[str, float | None]:
    """Bytes a second, by short copies: device_bytes_per_s, of its own memory, read and written; bus_bytes_per_s, from pinned
    host memory to it, None on a CPU."""
    cuda = device.type == "cuda"
    size = 1 << (29 if cuda else 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: dict[str, float | None] = {"device_bytes_per_s": 2 * size / _seconds(lambda: target.copy_(source), device)}
    if not cuda:
        return {**found, "bus_bytes_per_s": None}
    pinned = torch.zeros(size // 2, dtype=torch.uint8, pin_memory=True)
    part = target[: size // 2]
    return {**found, "bus_bytes_per_s": size // 2 / _seconds(lambda: part.copy_(pinned, non_blocking=True), device)}


def _seconds(work: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The shortest of some runs after one that does not count."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def emit(line: dict[str, Any], out: Path | None, *, quiet: bool = False) -> None:
    """Print one JSON line unless quiet, and append it to a file if one is given."""
    text = json.dumps(line)
    if not quiet:
        print(text, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")


class Report:
    """The lines of a benchmark, printed unless quiet and appended to a file if one is given, each as it comes: what all of them
    say, what is reported, and the machine."""

    def __init__(self, out: Path | None, commit: str | None, *, quiet: bool = False, **base: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._out, self._quiet, self._base, self._card = out, quiet, base, provenance(commit)

    def __call__(self, line: dict[str, Any]) -> None:
        self.lines.append({**self._base, **line, **self._card})
        emit(self.lines[-1], self._out, quiet=self._quiet)


def _git_commit() -> str | None:
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
