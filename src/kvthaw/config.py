"""A cache's settings that apply to all methods. Imports no torch, so that a command refuses a bad value at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.formatting import read_bytes
from kvthaw.typecheck import check_type

if TYPE_CHECKING:
    import torch

KvDtype = Literal["fp8"]


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Crossing:
    """The number of tokens from which a method is faster than full attention.

    tokens: (sequences decoded together, tokens of each) at which both are equally fast, ascending.
    token_bytes: bytes of KV per token and layer of the model that was measured; 0: any model.
    source: where the numbers come from.
    device: of the model.
    """

    tokens: tuple[tuple[int, int], ...]
    token_bytes: int = 0
    source: str = "full_below"
    device: torch.device = field(default_factory=_cpu)

    def on(self, token_bytes: int, device: torch.device) -> Crossing:
        """Return the crossing of another model: its tokens are fewer in proportion to its bytes of KV per token."""
        share = self.token_bytes / token_bytes if self.token_bytes else 1.0
        tokens = tuple((seqs, round(each * share)) for seqs, each in self.tokens)
        return replace(self, tokens=tokens, token_bytes=token_bytes, device=device)

    def total(self, seqs: int) -> int:
        """Return the crossing's total tokens for `seqs` sequences: interpolated between known numbers, proportional beyond
        them."""
        few = [(n, each) for n, each in self.tokens if n <= seqs]
        many = [(n, each) for n, each in self.tokens if n > seqs]
        if not few or not many:
            return seqs * (few[-1] if few else many[0])[1]
        (a, low), (b, high) = few[-1], many[0]
        return round(a * low + (b * high - a * low) * (seqs - a) / (b - a))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The settings of a cache, checked here. `kvthaw.cache.plan.Settings` resolves them for a method and a model.

    budget: the most tokens that attention reads per KV head in one decode step, sink, window and full buffer included; an
        integer, or a fraction in (0, 1) of the length (see Settings.longer). It is full attention up to budget - buffer
        tokens.
    retrieved: instead of budget, the paper's regions and exactly this number of rows from the index, or a fraction of the
        length. More rows than the model has positions, or a batch capacity, are never retrieved.
    dense_layers: number of first layers that keep all KV on the device. None: the method's number for models of 16 layers
        and more.
    sparse_queries: continuations of at most this number of tokens are decoded one by one through the index, longer ones are
        dense. The last chunk of a prompt given in chunks is a continuation too.
    block_size: tokens in a block of host memory. None: default_block_size().
    host_bytes: the most host memory of KV blocks, including blocks allocated ahead. A pinned block takes whole pages of 2
        MiB. A prompt or a token that needs more raises HostMemoryError and changes nothing. None: no limit.
    device_memory: device memory that the cache may fill: bytes, text such as "8GiB", or "auto", the free memory at the
        first prompt less a margin for activations. Index, sink, ring, pool and dense layers count; the rest holds blocks.
        None: all blocks lie on the host.
    full_below: tokens per sequence, or a Crossing. Up to this length every layer attends to everything and keeps its KV on
        the device, if device_memory is None or large enough. Beyond it the method applies, until the cache is empty.
    kv_dtype: "fp8" stores rows in 8 bits, see `kvthaw.kernels.row_format`: in blocks on host and device, in files and in
        cached prompts. Rows are rounded before the index gets them: a prompt's when it is stored, a decoded token's when it
        leaves the ring. KV of dense layers, and all KV while full attention applies, stays in the model's dtype. A dense
        method refuses the setting. None: the method's default.
    """

    budget: int | float | None = None
    retrieved: int | float | None = None
    dense_layers: int | None = None
    seed: int = 0
    sparse_queries: int = 16
    block_size: int | None = None
    host_bytes: int | None = None
    device_memory: int | str | None = None
    full_below: int | Crossing | None = None
    kv_dtype: KvDtype | None = None

    def __post_init__(self) -> None:
        check_type(int | float | None, budget=self.budget, retrieved=self.retrieved)
        check_type(int | str | None, device_memory=self.device_memory)
        check_type(int | Crossing | None, full_below=self.full_below)
        check_type(int | None, host_bytes=self.host_bytes, dense_layers=self.dense_layers, block_size=self.block_size)
        check_type(int, seed=self.seed, sparse_queries=self.sparse_queries)
        check_type(str | None, kv_dtype=self.kv_dtype)
        if self.device_memory not in (None, "auto"):
            object.__setattr__(self, "device_memory", read_bytes(self.device_memory, "device_memory"))
        if self.kv_dtype is not None:
            one_of(get_args(KvDtype), kv_dtype=self.kv_dtype)
        if self.retrieved is not None and self.budget is not None:
            raise ConfigError(f"budget is {self.budget} and retrieved is {self.retrieved}; give one of them")
        if self.fraction is not None and not 0 < self.fraction < 1:
            name = "budget" if self.retrieved is None else "retrieved"
            raise ConfigError(f"{name} is {self.fraction}; a fraction of the length must lie between 0 and 1")
        at_least(0, dense_layers=self.dense_layers, seed=self.seed)
        if isinstance(self.full_below, int):
            at_least(0, full_below=self.full_below)
        if self.seed >= 1 << 63:
            raise ConfigError(f"seed is {self.seed}; it must be less than 2^63")
        at_least(1, sparse_queries=self.sparse_queries, block_size=self.block_size, host_bytes=self.host_bytes)

    @property
    def fraction(self) -> float | None:
        """Budget or retrieved, if it is a fraction of the length."""
        limit = self.budget if self.retrieved is None else self.retrieved
        return limit if isinstance(limit, float) else None

    @property
    def crossing(self) -> Crossing | None:
        """The length up to which full attention applies, if the user gave one."""
        return Crossing(((1, self.full_below),)) if isinstance(self.full_below, int) else self.full_below

    @classmethod
    def split(cls, arguments: Mapping[str, Any]) -> tuple[CacheConfig, dict[str, Any]]:
        """Return the settings among the arguments of a function, and the other arguments.

        A caller that has made its CacheConfig gives it as `config`, instead of settings by name.
        """
        others = {name: value for name, value in arguments.items() if name not in SETTINGS}
        if isinstance(others.get("config"), CacheConfig):
            return others.pop("config"), others
        return CacheConfig(**{name: arguments[name] for name in SETTINGS if name in arguments}), others


SETTINGS = tuple(each.name for each in fields(CacheConfig))
"""The names of the settings that every method takes."""
