"""A cache that transformers takes for its own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvthaw.cache.clock import Clock
from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host import HostMemory
from kvthaw.cache.layer import FrozenLayer
from kvthaw.cache.pipeline import Pipeline
from kvthaw.cache.plan import Settings, try_index
from kvthaw.cache.rotary import Rotary
from kvthaw.engine.decode import Replay
from kvthaw.engine.hf.attention import unwrap, use_kvthaw_attention
from kvthaw.engine.hf.hooks import foresee, rotary, turns_by_length
from kvthaw.engine.hf.layer import CacheLayer, FillingLayer, Layers, Shared
from kvthaw.errors import CacheError, ConfigError, UnsupportedModelError, at_least
from kvthaw.formatting import human, number, share
from kvthaw.methods import resolve
from kvthaw.typecheck import check_type
from kvthaw.types import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    """Share of the selected rows that were on the device already; None before any was selected."""
    fetched_bytes: int
    """Bytes of the other rows, brought from the host."""
    kv_device_bytes: int
    """Bytes of KV on the device, in layers that retrieve or evict."""
    kv_dense_bytes: int
    """Bytes of KV on the device, in dense layers."""
    kv_host_bytes: int
    """Bytes of KV on the host."""
    captures: int
    """How often a step was captured, in one CUDA graph or several."""
    capture_seconds: float
    """Time that all captures took."""
    capture_bytes: int
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


def of_layer(config: Any, layer: int) -> Any:
    """The config of one layer of a decoder, whose layers may differ (Gemma 4)."""
    return config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config


def head_dim(config: Any) -> int:
    """The dimensions of a layer's keys, by its config."""
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


class Cache(DynamicCache):
    """A KV cache that keeps most of itself frozen on the host; give it to generate() or forward() as past_key_values.

    Takes a DynamicCache of the model and replaces its full-attention layers; sliding-window and linear layers stay as they are.
    Making one sets the model's attention function to kvthaw's, which serves plain caches too; `kvthaw.detach(model)` undoes that.
    No gradients flow through it.

    model: a decoder whose attention goes through transformers' AttentionInterface. method: a name in METHODS or a Method;
    further keyword arguments are the method's options. budget, retrieved, seed, sparse_queries, extent, host_bytes: see
    `kvthaw.cache.plan.Settings`. dense_layers: the first layers, which keep all KV on the device (default: the papers' 2 for
    models of 16 layers and more, else 0).

    Give it to assisted decoding on an attached model: kvthaw must see the forward's arguments to tell candidates from a question.

    Raises CacheError, with the layer, if the model gives keys or values that are not finite: see `check_finite`.
    Raises ConfigError for a setting out of range and UnsupportedModelError for a model that cannot work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "icecache",
        *,
        budget: int | float | None = None,
        retrieved: int | None = None,
        dense_layers: int | None = None,
        seed: int = 0,
        sparse_queries: int = 16,
        extent: int = 1024,
        host_bytes: int | None = None,
        **options: Any,
    ) -> None:
        model = unwrap(model)
        use_kvthaw_attention(model)
        chosen = resolve(method, **options)
        config = model.config.get_text_config(decoder=True)
        super().__init__(config=config)
        self.layers: Layers = Layers(self.layers)
        full = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        if not full:
            raise UnsupportedModelError(f"{type(model).__name__} has no full-attention layer whose KV could be offloaded")
        if dense_layers is None:
            dense_layers = 2 if len(self.layers) >= 16 else 0
        self.shares_kv = bool(getattr(config, "num_kv_shared_layers", 0))
        if self.shares_kv:
            sparse_queries = 1  # layers that share KV ask after the index has gone on, so several tokens at once are dense
        self.settings = Settings(chosen, budget, retrieved, dense_layers, seed, sparse_queries, extent, host_bytes)
        frozen = [] if chosen.dense else [i for i in full if i >= dense_layers]
        if not frozen and not chosen.dense:
            raise ConfigError(f"dense_layers is {dense_layers}; that leaves no layer to {chosen.name}, of {len(self.layers)}")
        for dim in {head_dim(of_layer(config, i)) for i in frozen}:
            try_index(chosen, dim, model.dtype, getattr(config, "attn_logit_softcapping", None))
        self.replay: Replay | None = None
        self.rolls_back = False
        """Whether a forward that asks for several logits may be a verification of assisted decoding."""
        self.turns_by_length = turns_by_length(model)
        self.pipeline, clock, dense_clock = Pipeline(len(self.layers), HostMemory(host_bytes)), Clock(), Clock()
        self._shared = Shared(model, self.settings, len(frozen), foresee if chosen.foresees else None, self.pipeline.memory)
        leader: FrozenLayer | None = None
        for i in full:
            kv: FrozenLayer | DenseLayer
            if i not in frozen:
                kv = DenseLayer(i, dense_clock)
            elif chosen.index is None or self._anchors(i, frozen):
                kv = leader = FrozenLayer(i, self.settings, self.pipeline, clock)
            else:
                if leader is None:
                    raise ConfigError(
                        f"anchors is {chosen.anchors}; layer {i} comes before the first and has nothing to follow"
                    )
                kv = FrozenLayer(i, self.settings, self.pipeline, clock, leader)
            self.layers[i] = CacheLayer(kv, self._shared)
        self._shared.of = weakref.ref(self.layers)
        for kv in self.frozen_layers:
            kv.positions = self._shared.positions
        if chosen.rotary:
            turns: dict[str, Rotary | None] = {}
            for kv in self.frozen_layers:
                kind = (getattr(config, "layer_types", None) or {kv.number: ""})[kv.number]
                kv.rotary = turns.setdefault(kind, rotary(model, kind))

    def _anchors(self, layer: int, frozen: list[int]) -> bool:
        anchors = self.settings.method.anchors
        if isinstance(anchors, int):
            return frozen.index(layer) % anchors == 0
        shares = [int(a * len(self.layers)) for a in anchors if isinstance(a, float)]
        return layer in anchors or layer in shares or (bool(shares) and layer == frozen[0])

    @property
    def kv_layers(self) -> list[FrozenLayer | DenseLayer]:
        """The layers that kvthaw serves, in order."""
        return [layer.kv for layer in self.layers if isinstance(layer, CacheLayer)]

    @property
    def frozen_layers(self) -> list[FrozenLayer]:
        """Those of them whose KV is offloaded or evicted."""
        return [kv for kv in self.kv_layers if isinstance(kv, FrozenLayer)]

    def at_lane(self, lane: int) -> DynamicCache:
        """What a prompt is given that goes to one lane; the cache's layers know how many lanes they have. For `kvthaw.Batch`."""
        model = self._shared.model()
        if model is None:
            raise CacheError("the model of this cache is gone")
        shared = Shared(model, self.settings, len(self.frozen_layers), None, self.pipeline.memory)
        view = DynamicCache()
        view.layers = Layers(FillingLayer(layer, lane, shared) for layer in self.layers)
        shared.of = weakref.ref(view.layers)
        return view

    @property
    def reordered(self) -> bool:
        """Whether lanes changed places between steps, as beams do."""
        return self._shared.reordered

    @property
    def foreign(self) -> list[str]:
        """Types of layers that are neither kvthaw's nor plain attention, whose state a later chunk may not take up. Layers that
        share another's KV hold none."""
        plain = (CacheLayer, DynamicLayer, DynamicSlidingWindowLayer)
        held = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)]
        return [type(layer).__name__ for layer in held if type(layer) not in plain]

    @contextmanager
    def prompt(self, tokens: int) -> Iterator[None]:
        """Within it the next `tokens` tokens of each row (padding included) are one prompt, in chunks of any size: what does not
        fit is refused with the first, all are attended to densely, and what is better indexed whole is, with the last."""
        for kv in self.kv_layers:
            kv.expect(tokens)
        try:
            yield
        finally:
            for kv in self.kv_layers:
                kv.expect(0)

    def activate_past_recording(self) -> None:
        """Expect a crop after each forward: generate() calls this before assisted decoding."""
        super().activate_past_recording()
        self.rolls_back = True

    def reserve(self, tokens: int) -> None:
        """Allocate the host memory that the next tokens take, if they are decoded through the index. Raises HostMemoryError before
        anything has changed."""
        self._shared.reserve(tokens)

    def check_finite(self) -> None:
        """Raise CacheError, with the layer, if the model gave keys or values that are not finite while decoding: on a CPU at the
        next call, on a GPU some steps later, since the host waits for nothing. Cleared by crop() and reset()."""
        self._shared.check_finite()

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Within it, new tokens are candidates of assisted decoding: however many they are, each is decoded through the index."""
        for kv in self.frozen_layers:
            kv.verifying = True
        try:
            yield
        finally:
            for kv in self.frozen_layers:
                kv.verifying = False

    def check_mask(self, mask: Tensor) -> None:
        """Raise CacheError for a mask, [B, n] or [B, 1, 1, n] bool, that does not fit a step of one token."""
        kv = self.kv_layers[0]
        self._shared.read_mask(mask[:, None, None].bool() if mask.ndim == 2 else mask, kv, kv.lanes, kv.seen, 1)

    def reset(self) -> None:
        """Forget everything, and the captured step, which holds what it reads."""
        super().reset()
        self.replay = None

    def wait(self) -> None:
        """Until every token is offloaded and indexed; raises what went wrong on the way."""
        for kv in self.frozen_layers:
            kv.settle()

    def keep(self, length: int) -> None:
        """Keep the first `length` tokens of every row, padding included, and forget those behind. Raises CacheError, with every
        layer as it was, where one cannot."""
        check_type(int, length=length)
        at_least(0, length=length)
        self.crop(min(0, length - self.get_seq_length()))

    def __repr__(self) -> str:
        layers, first = self.kv_layers, self.kv_layers[0]
        device, host = sum(kv.device_bytes() for kv in layers), sum(kv.host_bytes() for kv in layers)
        rows = f" in each of {first.lanes} rows" if first.lanes > 1 else ""
        return f"<Cache: {self.settings}; {first.seen:,} tokens{rows}; KV {human(device)} on the device, {human(host)} on the host>"

    @torch.inference_mode(False)
    def fork(self, method: str | Method, **settings: Any) -> Cache:
        """A cache of the same tokens under another method or budget (one prefill serves many). Settings as in the constructor;
        those not given are this cache's, the budget included. The two are independent afterwards; what is offloaded for the forks
        of a dense cache is offloaded once and stays on the host with that cache."""
        model = self._shared.model()
        if model is None:
            raise CacheError("the model of this cache is gone")
        mine = self.settings
        if "budget" not in settings and "retrieved" not in settings:
            settings |= {"budget": mine.budget, "retrieved": mine.retrieved}
        for name in ("dense_layers", "seed", "sparse_queries", "extent", "host_bytes"):
            settings.setdefault(name, getattr(mine, name))
        twin = Cache(model, method, **settings)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer):
                twin.layers[i].kv.copy_from(layer.kv)
            else:
                twin.layers[i] = copy.deepcopy(layer)  # in place: twin._shared has the same list
        twin._know_as(self)
        return twin

    def introduce(self) -> None:
        """Know whose attention each layer is, as after a prompt, where tokens came without one: by a token that goes elsewhere."""
        model = self._shared.model()
        if model is None:
            raise CacheError("the model of this cache is gone")
        other = Cache(model, "full")
        with torch.no_grad():
            model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=other)
        self._know_as(other)

    def _know_as(self, other: Cache) -> None:
        for mine, its in zip(self.layers, other.layers, strict=True):
            module = its.module() if isinstance(its, CacheLayer) and its.module is not None else None
            if module is not None and isinstance(mine, CacheLayer):
                mine.know(module)

    def stats(self) -> Stats:
        """What the cache holds and did so far. Waits for the device."""
        layers, frozen = self.kv_layers, self.frozen_layers
        plan = frozen[0].plan if frozen else None
        groups = {id(kv.group): kv.group for kv in frozen if kv.group is not None}.values()
        steps = sum(group.meter.steps for group in groups)
        selected = sum(int(group.meter.selected) for group in groups)
        fetched = sum(int(group.meter.fetched) for group in groups)
        most = max((int(group.meter.most) for group in groups), default=0)
        held_steps = sum(kv.held_steps for kv in frozen)
        attended = sum(kv.held_sum for kv in frozen) / held_steps if held_steps else None
        retrieved = selected / steps if steps else (0.0 if held_steps else None)
        fetched_bytes = sum(int(kv.group.meter.fetched) * kv.store.row_bytes for kv in frozen if kv.group is not None)
        return Stats(
            method=self.settings.method.name,
            budget=plan.budget if plan else None,
            layers=len(layers),
            dense_layers=len(layers) - len(frozen),
            batch=layers[0].lanes,
            tokens=layers[0].seen,
            sparse_steps=sum(kv.sparse_steps for kv in frozen),
            dense_tokens=max((kv.dense_tokens for kv in frozen), default=0),
            attended_mean=None if attended is None else attended + (retrieved or 0.0),
            attended_max=max((kv.held_max for kv in frozen), default=0) + most if held_steps else None,
            retrieved=retrieved,
            hit_rate=1 - fetched / selected if selected else None,
            fetched_bytes=fetched_bytes,
            kv_device_bytes=sum(kv.device_bytes() for kv in frozen),
            kv_dense_bytes=sum(kv.device_bytes() for kv in layers if isinstance(kv, DenseLayer)),
            kv_host_bytes=sum(kv.host_bytes() for kv in layers),
            captures=self.replay.captures if self.replay else 0,
            capture_seconds=self.replay.capture_seconds if self.replay else 0.0,
            capture_bytes=self.replay.capture_bytes if self.replay else 0,
        )
