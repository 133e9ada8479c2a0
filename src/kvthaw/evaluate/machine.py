"""What results were made with, and the clock that they are timed by."""

from __future__ import annotations

import hashlib
import platform
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.identity import adapters, kv_weights
from kvthaw.engine.hf.model import find_device
from kvthaw.kernels import HAS_TRITON
from kvthaw.version import __version__


def identity(model: PreTrainedModel, name: str) -> dict[str, str]:
    """Return the fields on which every result depends: the model, its weights, dtype and device, and kvthaw's version."""
    return {
        "model": name,
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "kvthaw": __version__,
    }


def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of a model's weights and active adapters. It covers names, shapes, dtypes and the first values of
    every weight."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in kv_weights(model):
        head = weight.flatten()[:16].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + head)
    if active := adapters(model):
        digest.update(str(active).encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of kvthaw, torch, transformers and Python."""
    return {
        "kvthaw": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def provenance() -> dict[str, Any]:
    """Return what every benchmark reports with its numbers: GPU or CPU, and versions."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        **versions(),
        "triton": import_module("triton").__version__ if HAS_TRITON else None,
    }


def where(name: str | None = None) -> tuple[torch.device, str]:
    """Return the device to measure (by torch's name; None: the GPU if there is one) and its name in results."""
    device = find_device(name)
    return device, device_name(device)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def now(device: torch.device) -> float:
    """Synchronise the device and return the time in seconds."""
    synchronize(device)
    return time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
