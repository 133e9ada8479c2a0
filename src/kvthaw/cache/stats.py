"""Statistics of a cache's content and work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Held
from kvthaw.formatting import counted, human, number, share
from kvthaw.regions import Regions


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a cache. Bytes are of K and V. Token counts are per KV head and step, over the layers that retrieve.

    str() gives one sentence.
    """

    method: str
    """Name of the method in force."""
    budget: int | None
    """Most tokens attended per KV head and step; None before the first prompt, and for full attention."""
    regions: Regions | None
    """Sink, window and update buffer in force, in tokens; None as for budget."""
    paper_regions: Regions | None
    """The method's own regions. If they take more than half the budget, `regions` is smaller."""
    layers: int
    """Layers that kvthaw serves."""
    dense_layers: int
    """Layers that keep all KV on the device."""
    batch: int
    """Number of sequences."""
    tokens: int
    """Tokens of the longest sequence, padding included."""
    sparse_steps: int
    """Tokens decoded through the method, times the layers."""
    dense_tokens: int
    """Tokens after the first prompt that attended to everything, in continuations longer than `sparse_queries`."""
    attended_mean: float | None
    """Mean tokens attended in a sparse step; None before the first."""
    attended_max: int | None
    """The most tokens that a KV head attended to."""
    retrieved: float | None
    """Mean number of rows among them that the index selected."""
    hit_rate: float | None
    """Share of the selected rows that were not copied; None before any was selected.

    Such rows were in the pool already, or attention read them in blocks on the device.
    """
    device_rate: float | None
    """Share of the selected rows that were read or copied from blocks on the device."""
    fetched_bytes: int
    """Bytes of rows that crossed the bus from the host."""
    kv_device_bytes: int
    """Bytes of KV on the device, in layers whose KV is offloaded."""
    kv_dense_bytes: int
    """Bytes of KV on the device in layers that attend to everything, and in sliding-window layers that kvthaw serves (in a
    `Batch`)."""
    kv_host_bytes: int
    """Bytes of KV on the host."""
    device_block_bytes: int = 0
    """Bytes of KV in blocks on the device (see device_memory); part of kv_device_bytes."""
    moved_bytes: int = 0
    """Bytes of blocks moved between device and host so far."""
    cached_tokens: int = 0
    """Prompt tokens that came from a prefix cache."""
    captures: int = 0
    """Number of captures of a step, each as one CUDA graph or several."""
    capture_seconds: float = 0.0
    """Time that all captures took."""
    capture_bytes: int = 0
    """Device memory that the latest capture holds."""
    reason: str = ""
    """Why full attention or the method is in force, if the number of tokens decided it."""
    kv_dtype: str | None = None
    """How blocks store rows; None: in the model's dtype. Dense layers and full attention always use the model's dtype."""
    no_effect: dict[str, str] = field(default_factory=dict)
    """Settings that were given and change nothing here, with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, for JSON."""
        return asdict(self)

    @property
    def no_choice(self) -> str:
        """Why no step had to select among tokens; "" if one did."""
        if not self.tokens:
            return "there are no tokens"
        if self.budget is None:
            return self.reason or f"{self.method} has no index"
        if self.tokens <= self.budget:
            return f"the budget of {self.budget:,} has room for {'all ' * (self.tokens > 1)}{counted(self.tokens, 'token')}"
        if not self.sparse_steps:
            return "no token has been decoded yet, and prompts attend to everything"
        return "" if self.retrieved else f"{self.method} attends to the first and the latest tokens alone"

    @property
    def shrunk(self) -> str:
        """Which regions are smaller than the method's own for lack of budget; "" if none is."""
        left = [
            f"{name} {getattr(self.regions, name)} of {getattr(self.paper_regions, name)}"
            for name in ("sink", "window", "buffer")
            if self.regions and getattr(self.regions, name) < getattr(self.paper_regions, name)
        ]
        return f"the budget leaves {', '.join(left)} tokens" if left else ""

    def __str__(self) -> str:
        if self.reason and not self.tokens:
            return f"{self.method}: {self.reason}"
        attended = "all" if self.attended_mean is None else f"{number(self.attended_mean)} of"
        dense = f"{counted(self.dense_tokens, 'later prompt token')} attended to everything" if self.dense_tokens else ""
        stored = f", rows in {self.kv_dtype}" if self.kv_dtype else ""
        host = f", {human(self.kv_host_bytes)} on the host{stored}" if self.kv_host_bytes else ""
        hits = "" if self.hit_rate is None else f"{share(self.hit_rate)} of the selected rows were on the device already"
        parts = (
            f"{self.method}: {attended} {counted(self.tokens, 'token')} attended per step",
            dense,
            self.shrunk,
            f"KV {human(self.kv_device_bytes + self.kv_dense_bytes)} on the device{host}",
            hits,
            self.reason,
        )
        return "; ".join(filter(None, parts))


def collect(settings: Settings, sequences: Sequences, layers: Sequence[LayerKV], reason: str = "") -> Stats:
    """Return statistics of the layers of a cache. Waits for the device."""
    offloaded = [layer for layer in layers if isinstance(layer, OffloadedLayer) and not layer.attends_to_all]
    plan, held = (offloaded[0].plan, sequences.held) if offloaded else (None, Held())
    searching = [(layer, layer.retriever) for layer in offloaded if layer.retriever is not None]
    groups = {group: group.residency.counted() for _, group in searching}
    steps = sum(group.context.kv_heads * (held.steps + group.asked_again) for group in groups)
    selected = sum(each.selected for each in groups.values())
    fetched, most = sum(each.fetched for each in groups.values()), max((each.most for each in groups.values()), default=0)
    retrieved = selected / steps if steps else (0.0 if held.steps else None)
    crossed = [
        (layer, groups[group].fetched if layer.storage.placement is None else int(layer.store.crossed.sum()))
        for layer, group in searching
    ]
    every = [groups[group] for _, group in searching]
    near = sum(each.in_place + each.fetched for each in every) - sum(rows for _, rows in crossed)
    wanted = sum(each.selected for each in every)
    return Stats(
        method=settings.method.name if offloaded or settings.method.dense else "full",
        reason=reason,
        kv_dtype=settings.kv_dtype if offloaded else None,
        budget=plan.budget if plan else None,
        regions=plan.regions if plan else None,
        paper_regions=settings.method.regions if plan else None,
        layers=len(layers),
        dense_layers=sum(layer.attends_to_all for layer in layers),
        batch=sequences.count,
        tokens=sequences.padded_length,
        sparse_steps=held.tokens * len(offloaded) + sum(layer.asked_again for layer in offloaded),
        dense_tokens=sequences.dense_tokens if offloaded else 0,
        attended_mean=held.total / held.steps + (retrieved or 0.0) if held.steps else None,
        attended_max=held.most + most if held.steps else None,
        retrieved=retrieved,
        hit_rate=1 - fetched / selected if selected else None,
        device_rate=near / wanted if wanted else None,
        fetched_bytes=sum(rows * layer.store.row_bytes for layer, rows in crossed),
        kv_device_bytes=sum(layer.device_bytes() for layer in offloaded),
        kv_dense_bytes=sum(layer.device_bytes() for layer in layers if layer not in offloaded),
        kv_host_bytes=sum(layer.host_bytes() for layer in layers),
        device_block_bytes=sum(layer.store.nbytes(on_device=True) for layer in offloaded),
        cached_tokens=sequences.cached_tokens,
        moved_bytes=sum(layer.storage.placement.moved_bytes for layer in offloaded if layer.storage.placement),
    )
