"""What a cache holds and did, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvthaw.formatting import human, number, share


@dataclass(frozen=True, slots=True)
class Stats:
    """What a cache holds and did. Bytes are of K and V; counts of tokens are per KV head and step, over the layers that retrieve.
    str() is one sentence."""

    method: str
    """Name of the method."""
    budget: int | None
    """Most tokens attended per KV head and step; None before the first prompt, and for full attention."""
    layers: int
    """Layers that kvthaw serves."""
    dense_layers: int
    """Those of them that keep all KV on the device."""
    batch: int
    """Rows."""
    tokens: int
    """Tokens of a row, padding included."""
    sparse_steps: int
    """Tokens decoded through the method, times the layers."""
    dense_tokens: int
    """Tokens after the first prompt that attended to everything, in continuations longer than `sparse_queries`."""
    attended_mean: float | None
    """Tokens attended in a sparse step, on average; None before the first."""
    attended_max: int | None
    """The same at most: never more than the budget."""
    retrieved: float | None
    """Rows that the index selected among them, on average."""
    hit_rate: float | None
    """Share of the selected rows that were in the pool already; None before any was selected."""
    device_rate: float | None
    """Share of them that were copied from blocks on the device."""
    fetched_bytes: int
    """Bytes of the other rows, which crossed the bus from the host."""
    kv_device_bytes: int
    """Bytes of KV on the device, in layers that retrieve or evict."""
    kv_dense_bytes: int
    """Bytes of KV on the device, in dense layers."""
    kv_host_bytes: int
    """Bytes of KV on the host."""
    device_block_bytes: int = 0
    """Bytes of KV in blocks that lie on the device (see device_memory); part of kv_device_bytes."""
    moved_bytes: int = 0
    """Bytes of blocks moved between device and host so far."""
    captures: int = 0
    """How often a step was captured, in one CUDA graph or several."""
    capture_seconds: float = 0.0
    """Time that all captures took."""
    capture_bytes: int = 0
    """Device memory that the latest capture holds."""

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        attended = "all" if self.attended_mean is None else f"{number(self.attended_mean)} of"
        device = human(self.kv_device_bytes + self.kv_dense_bytes)
        dense = f", {self.dense_tokens:,} tokens attended to all" if self.dense_tokens else ""
        return (
            f"{self.method}: {attended} {self.tokens:,} tokens attended a step{dense}; KV {device} on the device, "
            f"{human(self.kv_host_bytes)} on the host; hit rate {share(self.hit_rate)}"
        )
