"""The resolved settings of a cache, and the sizes that follow from them for a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import held_bytes
from kvthaw.cache.index_api import Index, IndexContext, Method
from kvthaw.cache.page_locked import HUGE
from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.config import SETTINGS, CacheConfig, Crossing
from kvthaw.errors import ConfigError
from kvthaw.regions import BUDGET, Regions


def default_block_size(token_bytes: int) -> int:
    """Return the default tokens per block: the smallest number from 256 on that fills whole huge pages.

    Huge pages are pinned many at a time, and short sequences leave half a block empty. If no number up to 1,024 fills one, return
    the number from 512 on that best fills the pinned memory of a block.

    token_bytes: bytes of a stored token in one layer.
    """

    def filled(tokens: int) -> float:
        return tokens * token_bytes / held_bytes(tokens * token_bytes, pinned=True)

    whole = (tokens for tokens in range(256, 1025, 32) if tokens * token_bytes > HUGE // 2 and filled(tokens) >= 0.95)
    return next(whole, max(range(512, 1025, 64), key=lambda tokens: (filled(tokens), tokens)))


def try_index(method: Method, head_dim: int, dtype: torch.dtype = torch.float32, softcap: float | None = None) -> Index | None:
    """Return an empty index of a method, for one head on the CPU; None if the method has no index.

    Raises ConfigError if the method refuses its options for this head_dim, makes something that is no Index, or does not
    support softcap.
    """
    index: Index | None = None
    if method.index is not None:
        store, device = HostStore(0, 1, head_dim, dtype), torch.device("cpu")
        index = method.make_index(IndexContext(0, 1, 1, head_dim, dtype, device, store, method.regions, scale=1.0, rows=1))
        if softcap is not None and index.traits.attends:
            raise ConfigError(
                f"{method.name} attends to some tokens itself, without the softcap of {softcap} that the model has; it works with "
                "models that have none"
            )
    return index


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes for one cache: the regions, and how many rows the index may select per KV head and step."""

    regions: Regions
    rows: int

    @property
    def budget(self) -> int:
        """The most tokens attended per KV head in a step, with a full buffer."""
        return self.regions.held + self.rows


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a cache takes, in bytes, when its sequences have reached their full length.

    dense: on the device, KV of the layers that attend to everything, at their capacity.
    slab: on the device, sink, window, buffer and fetched rows.
    index: on the device.
    blocks: on the device, rows that lie there.
    windows: on the device, KV of sliding-window layers.
    rows: on the host.
    host_index: on the host, an estimate.
    searching: number of layers that select rows.
    plan: the sizes in force; None if every layer attends to everything.
    reason: why full attention or the method is in force.
    capacity: tokens per sequence that the device has room for.
    fetched: bytes that cross the bus in a step if no selected row is on the device already.
    """

    dense: int
    slab: int
    index: int
    blocks: int
    rows: int
    host_index: int
    searching: int
    plan: Plan | None
    reason: str
    capacity: int
    fetched: int
    windows: int = 0

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.dense + self.windows + self.slab + self.index + self.blocks

    @property
    def host(self) -> int:
        """All bytes on the host."""
        return self.rows + self.host_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(CacheConfig):
    """A cache's method, and its configuration with every default resolved.

    ranks: the processes that the model is split over. Sizes in bytes are per process.
    """

    method: Method = field(kw_only=False)
    ranks: Ranks = ALONE
    dense_layers: int = 0
    block_size: int = 1024
    full_below: Crossing | None = None

    def __post_init__(self) -> None:
        CacheConfig.__post_init__(self)
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.method.kv_dtype)
        if self.kv_dtype is not None and self.method.dense:
            raise ConfigError(
                f"kv_dtype is {self.kv_dtype!r}, and {self.method.name} keeps all KV on the device in the model's dtype; it "
                "must be None unless the method offloads"
            )
        if self.retrieved is not None and ((self.fraction is None and self.retrieved < 1) or self.method.index is None):
            raise ConfigError(f"retrieved is {self.retrieved}; it must be at least 1, for a method that retrieves")
        if isinstance(self.budget, int):
            self.plan(0)

    @classmethod
    def of(cls, method: Method, config: CacheConfig, **resolved: Any) -> Settings:
        """Return a method's settings: a configuration's, `resolved` in their place, and defaults for what is open."""
        given = {name: value for name in SETTINGS if (value := getattr(config, name)) is not None}
        return cls(method, **given | resolved)

    def __str__(self) -> str:
        if self.method.dense:
            return self.method.name
        budget, full = BUDGET if self.budget is None else self.budget, ""
        if self.full_below is not None:
            full = f"full attention up to {self.full_below.total(1):,} tokens, then "
        rows = f"budget {budget}" if self.retrieved is None else f"{self.retrieved} retrieved"
        return f"{full}{self.method.name}, {rows}" + (f", rows in {self.kv_dtype}" if self.kv_dtype else "")

    def in_blocks(self, tokens: int) -> int:
        """Return the token capacity of the blocks for a sequence of `tokens` tokens."""
        return -(-tokens // self.block_size) * self.block_size

    def selects(self, layer: int, offloaded: Sequence[int], depth: int) -> bool:
        """Return whether a layer selects rows, for itself and for the layers after it up to the next anchor.

        offloaded: the layers that retrieve, of `depth` in all.
        """
        anchors = self.method.anchors
        if isinstance(anchors, int):
            return offloaded.index(layer) % anchors == 0
        shares = [int(a * depth) for a in anchors if isinstance(a, float)]
        return layer in anchors or layer in shares or (bool(shares) and layer == offloaded[0])

    def plan(self, prompt: int, most: int | None = None) -> Plan:
        """Return the sizes for a prompt of `prompt` tokens. Only fractions depend on the length.

        most: tokens that a sequence can have, which limits window and rows.
        """
        regions = self.method.regions
        if self.retrieved is not None:
            rows = self.retrieved if isinstance(self.retrieved, int) else max(1, math.ceil(self.retrieved * prompt))
        else:
            budget = BUDGET if self.budget is None else self.budget
            if isinstance(budget, float):
                budget = math.ceil(budget * prompt)
            if self.method.index is None:
                least = regions.sink + regions.buffer + 1
                if budget < least:
                    raise ConfigError(f"budget is {budget}; the smallest that works with {self.method.name} is {least} tokens")
                regions = replace(regions, window=budget - regions.sink - regions.buffer)
            else:
                regions = regions.for_budget(budget)
            rows = budget - regions.held
        return (
            Plan(regions, rows) if most is None else Plan(replace(regions, window=min(regions.window, most)), min(rows, most))
        )

    def longer(self, plan: Plan, length: int) -> Plan:
        """Return the sizes for sequences that have grown to `length` tokens: a fraction gives more rows, in unchanged regions.

        A cache calls this whenever its capacity grows; until then no tensor of a captured step moves. Capacity first
        exceeds the prompt by 1/16 or 256 tokens, and later grows by half. The budget is therefore at most the fraction of
        the current length, and from the first growth on at least two thirds of it. A method that retrieves nothing keeps
        the prompt's window.
        """
        if self.fraction is None or self.method.index is None:
            return plan
        held = plan.regions.held if self.retrieved is None else 0
        return replace(plan, rows=max(plan.rows, math.ceil(self.fraction * length) - held))


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
