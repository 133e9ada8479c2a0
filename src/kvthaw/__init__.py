"""kvthaw: attend to a context far larger than the accelerator's KV memory.

The whole KV cache lies frozen in host memory. At every decode step an index over a KV head's keys finds the few tokens that
its query needs. Only these are fetched (thawed) to the device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvthaw.errors import CacheError, ConfigError, HostMemoryError, KvthawError, QueueFullError, UnsupportedModelError
from kvthaw.version import __version__

if TYPE_CHECKING:
    from kvthaw.cache.index_api import Method
    from kvthaw.cache.prefix import PrefixCache
    from kvthaw.engine.batch import Batch
    from kvthaw.engine.hf import Cache, Handle, Stats, attach, detach
    from kvthaw.engine.request import Request
    from kvthaw.engine.sampling import Sampling
    from kvthaw.engine.scheduler import Scheduler
    from kvthaw.methods import METHODS

__all__ = [
    "METHODS",
    "Batch",
    "Cache",
    "CacheError",
    "ConfigError",
    "Handle",
    "HostMemoryError",
    "KvthawError",
    "Method",
    "PrefixCache",
    "QueueFullError",
    "Request",
    "Sampling",
    "Scheduler",
    "Stats",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "detach",
]

_HOMES = {
    "Batch": "kvthaw.engine.batch",
    "Request": "kvthaw.engine.request",
    "Sampling": "kvthaw.engine.sampling",
    "Scheduler": "kvthaw.engine.scheduler",
    "Cache": "kvthaw.engine.hf",
    "Handle": "kvthaw.engine.hf",
    "Stats": "kvthaw.engine.hf",
    "attach": "kvthaw.engine.hf",
    "detach": "kvthaw.engine.hf",
    "METHODS": "kvthaw.methods",
    "Method": "kvthaw.cache.index_api",
    "PrefixCache": "kvthaw.cache.prefix",
}
"""Names that need torch are imported on first use, so that `kvthaw --help` answers at once."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
