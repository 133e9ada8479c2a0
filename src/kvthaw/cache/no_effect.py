"""Find the settings of a cache that change nothing, and why. They are accepted, since one call may serve many methods; stats()
reports them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvthaw.cache.index_api import Index, Method
from kvthaw.cache.plan import Settings
from kvthaw.config import CacheConfig

_DEFAULT = CacheConfig()
_DENSE = ("budget", "dense_layers", "device_memory", "full_below", "seed", "sparse_queries")


def stays_on_host(method: Method, index: Index | None, device: torch.device) -> str | None:
    """Return why a method's blocks stay on the host even if the device has room; None if they need not."""
    if method.index is None:
        return f"{method.name} reads no stored row again, so its blocks stay on the host"
    if index is not None and index.traits.on_host:
        return f"{method.name} searches on the host, where its blocks stay"
    if device.type != "cpu" and method.transfer is not None and not method.transfer().graph_safe:
        return f"{method.name} gathers rows on the host, where its blocks stay"
    return None


def no_effect(
    given: CacheConfig, settings: Settings, stays: str | None, numbers: Sequence[int], device: torch.device
) -> dict[str, str]:
    """Return the settings that were given and change nothing, with the reason, by name.

    given: the configuration as the user gave it.
    settings: the resolved configuration.
    stays: why blocks stay on the host; None if they need not.
    numbers: of the model's full-attention layers.
    """
    method, found = settings.method, dict[str, str]()
    if method.dense:
        found = dict.fromkeys(_DENSE, f"{method.name} attends to everything and keeps all KV on the device")
    elif device.type == "cpu" and given.device_memory == "auto":
        found["device_memory"] = "on a CPU auto is nothing"
    elif settings.full_below is None and stays is not None:
        found["device_memory"] = stays
    if method.index is None and not method.dense:
        found["seed"] = f"{method.name} draws nothing"
    if given.dense_layers and min(numbers) >= given.dense_layers:
        found["dense_layers"] = f"none of the first {given.dense_layers} layers attends to everything"
    if given.sparse_queries != settings.sparse_queries:
        found["sparse_queries"] = "layers share KV, so several tokens at once attend to everything"
    return {name: why for name, why in found.items() if getattr(given, name) != getattr(_DEFAULT, name)}
