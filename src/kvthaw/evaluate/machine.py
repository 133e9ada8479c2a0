"""What results were made with, and the clock that they are timed by."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING

import torch
import transformers

import kvthaw
from kvthaw.evaluate.model import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def identity(model: PreTrainedModel, name: str) -> dict[str, str]:
    """What a result depends on besides its job and variant: the model, how it runs, and kvthaw's version."""
    return {
        "model": name,
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "kvthaw": kvthaw.__version__,
    }


def versions() -> dict[str, str]:
    """What a result was made with."""
    return {
        "kvthaw": kvthaw.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def now(device: torch.device) -> float:
    """Seconds, after all that the device was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
