"""Provenance of the laboratory's numbers: that of every benchmark, and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from kvthaw.evaluate import machine


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Return GPU or CPU, versions and commit; commit None asks git, which may not know."""
    return machine.provenance() | {"commit": commit or _git_commit()}


def _git_commit() -> str | None:
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
