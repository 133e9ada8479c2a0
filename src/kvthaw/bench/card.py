"""What every benchmark says beside its numbers: the machine, the versions, the commit."""

from __future__ import annotations

import json
import platform
import subprocess
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


def emit(line: dict[str, Any], out: Path | None, *, quiet: bool = False) -> None:
    """Print one JSON line unless quiet, and append it to a file if one is given."""
    text = json.dumps(line)
    if not quiet:
        print(text, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")


def _git_commit() -> str | None:
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
