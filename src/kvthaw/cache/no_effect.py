"""Which settings of a cache change nothing, and why. They are accepted, for one call may serve many methods; stats() tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvthaw.cache.index_api import Index
from kvthaw.cache.plan import Settings

_DEFAULTS = {"seed": 0, "sparse_queries": 16}
_DENSE = ("budget", "dense_layers", "device_memory", "full_below", "seed", "sparse_queries")
_EVICTING = ("block_size", "device_memory", "host_bytes", "seed")


def no_effect(
    given: Mapping[str, Any], settings: Settings, index: Index | None, numbers: Sequence[int], device: torch.device
) -> dict[str, str]:
    """Return by name the settings that were given and change nothing, and why.

    given: as the user gave them, None or the default where not. settings: what became of them. index: one of the method's, None
    where it has none. numbers: of the layers that attend to everything.
    """
    method, found = settings.method, dict[str, str]()
    if method.dense:
        found = dict.fromkeys(_DENSE, f"{method.name} attends to everything and keeps all KV on the device")
    elif method.evicts:
        found = dict.fromkeys(_EVICTING, f"{method.name} evicts tokens: it stores no rows and draws nothing")
    elif device.type == "cpu" and given["device_memory"] == "auto":
        found["device_memory"] = "on a CPU auto is nothing"
    elif settings.full_below is None and index is not None and index.on_host:
        found["device_memory"] = f"{method.name} searches on the host, where its blocks stay"
    elif settings.full_below is None and method.transfer and device.type != "cpu" and not method.transfer().graph_safe:
        found["device_memory"] = f"{method.name} gathers rows on the host, where its blocks stay"
    if given["dense_layers"] and min(numbers) >= given["dense_layers"]:
        found["dense_layers"] = f"none of the first {given['dense_layers']} layers attends to everything"
    if given["sparse_queries"] != settings.sparse_queries:
        found["sparse_queries"] = "layers share KV, so several tokens at once attend to everything"
    return {name: why for name, why in found.items() if given[name] not in (None, _DEFAULTS.get(name))}
