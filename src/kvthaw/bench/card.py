"""Provenance that every benchmark reports with its numbers: the machine, the versions, the commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvthaw.engine.hf.model import find_device


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Return GPU or CPU, versions and commit; commit None asks git, which may not know."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit or _git_commit(),
    }


def where(name: str | None = None) -> tuple[torch.device, str]:
    """Return the device to measure (by torch's name; None: the GPU if there is one) and its name in results."""
    device = find_device(name)
    return device, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def noted(text: str) -> None:
    """Print a remark between the results."""
    print(text, file=sys.stderr, flush=True)


def _git_commit() -> str | None:
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
