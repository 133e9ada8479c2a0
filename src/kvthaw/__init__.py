"""kvthaw: attend to a context far larger than the accelerator's KV memory.

The whole KV cache lies frozen in host memory; at every decode step each KV head finds, by an index over its keys, the few tokens
that its query needs, and only those are thawed into the device.
"""

from kvthaw.engine.hf import Cache, Handle, Stats, attach
from kvthaw.errors import CacheError, ConfigError, HostMemoryError, KvthawError, UnsupportedModelError
from kvthaw.methods import METHODS
from kvthaw.types import Method

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Cache",
    "CacheError",
    "ConfigError",
    "Handle",
    "HostMemoryError",
    "KvthawError",
    "Method",
    "Stats",
    "UnsupportedModelError",
    "__version__",
    "attach",
]
