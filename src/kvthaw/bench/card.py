"""Provenance that every benchmark reports with its numbers: the machine and the versions."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from kvthaw.engine.hf.model import find_device
from kvthaw.evaluate.machine import versions


def provenance() -> dict[str, Any]:
    """Return GPU or CPU, and versions."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        **versions(),
        "triton": triton_version,
    }


def where(name: str | None = None) -> tuple[torch.device, str]:
    """Return the device to measure (by torch's name; None: the GPU if there is one) and its name in results."""
    device = find_device(name)
    return device, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def noted(text: str) -> None:
    """Print a remark between the results."""
    print(text, file=sys.stderr, flush=True)
