"""One file an op: the plain torch definition, then the Triton kernel, then the launcher.

Triton is optional (CPU builds of torch bring none); this is the one place that knows whether it is there.
"""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
