"""Kernels, one operation per file: its definition in plain torch, the Triton kernel and the launcher.

Triton is optional, as CPU builds of torch do not include it. Only this file checks whether it is installed.
"""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
