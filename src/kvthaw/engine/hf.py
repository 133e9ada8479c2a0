"""The adapter to Hugging Face transformers: the only file that touches its internals.

An attention function registered under the name "kvthaw" receives q, k, v after RoPE, but neither the cache nor the layer. So a
cache layer's update() returns the new keys and values as views that carry the layer as an attribute, and the attention function
reads it.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvthaw.cache.clock import Clock
from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host import check_host_memory
from kvthaw.cache.layer import Attention, FrozenLayer
from kvthaw.cache.pipeline import Pipeline
from kvthaw.cache.plan import Settings
from kvthaw.engine import ops
from kvthaw.engine.decode import Replay, replaying
from kvthaw.errors import CacheError, ConfigError, KvthawError, UnsupportedModelError
from kvthaw.index.rotary import Rotary
from kvthaw.kernels.dense import with_sinks
from kvthaw.methods import resolve
from kvthaw.types import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "kvthaw"
_TAG = "_kvthaw_layer"
_BEFORE: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
"""The attention that models had before kvthaw's."""
_ATTACHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models with an open handle."""
_FORESEEING: weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Attention modules before which the next layer's query is foreseen, for methods that ask for it."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a cache holds and did. Bytes are of K and V; counts are per KV head and step, over the layers that retrieve.

    budget: the promise; attended: tokens that were read (mean and largest); retrieved: rows from the index among them (mean);
    hit_rate: share of the retrieved rows that were on the device already, None before anything was retrieved.
    """

    method: str
    budget: int | None
    layers: int
    dense_layers: int
    batch: int
    tokens: int
    sparse_steps: int
    attended_mean: float | None
    attended_max: int | None
    retrieved: float | None
    hit_rate: float | None
    fetched_bytes: int
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)


class _Shared:
    """What the layers of one cache share: whose keys are on their way, what padding was last seen, whose modules ask."""

    def __init__(self, model: PreTrainedModel, settings: Settings, frozen: int) -> None:
        self.model = weakref.ref(model)
        self.modules = {id(module) for module in model.modules()}
        self.positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.settings, self.frozen = settings, frozen
        self.layers: list[Any] = []  # the cache's own list of its layers
        self.pending: _CacheLayer | None = None
        self._mask: weakref.ref[Tensor] | None = None
        self._pads: list[int] = []

    def left_pads(self, mask: Tensor | None, kv: FrozenLayer | DenseLayer, batch: int, steps: int) -> list[int]:
        """Left padding of each row, by a mask [B, 1, 1, n] over a layer's tokens and the new ones; syncs once a forward."""
        known = kv.left_pad or [0] * batch
        if mask is None:
            return known
        if self._mask is None or self._mask() is not mask:
            seen = mask[:, 0, 0]
            if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
                raise CacheError("attention_mask hides tokens after visible ones; kvthaw takes padding on the left only")
            self._pads = (seen.shape[1] - seen.sum(dim=1)).tolist()
            self._mask = weakref.ref(mask)
        if mask.shape[3] != kv.seen + steps:
            raise CacheError(
                f"attention_mask covers {mask.shape[3]} tokens; it must cover the {kv.seen} in the cache and {steps} new ones"
            )
        for row, (before, now) in enumerate(zip(known, self._pads, strict=True)):
            if now != before and before < kv.seen:
                raise CacheError(
                    f"attention_mask hides {now} tokens of row {row}, of which the cache knows {before} as padding"
                )
        return list(self._pads)

    def first(self) -> _CacheLayer:
        """The first of kvthaw's layers."""
        return next(layer for layer in self.layers if isinstance(layer, _CacheLayer))

    def check_whole(self, steps: int) -> None:
        """Refuse a cache whose layers hold different tokens, when the first of kvthaw's gets `steps` new ones."""
        first = self.first()
        at = self.layers.index(first)
        for i, layer in enumerate(self.layers):
            held = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
            due = first.kv.seen + (steps if i < at else 0)
            if held != due and (held or isinstance(layer, _CacheLayer)):  # some layers that are not kvthaw's hold nothing
                raise CacheError(
                    f"layer {i} holds {held} tokens and layer {at} {first.kv.seen}: a forward was interrupted; reset() the cache"
                )

    def attached(self) -> bool:
        """Whether the model of this cache attends through kvthaw."""
        model = self.model()
        return model is not None and model.config.get_text_config(decoder=True)._attn_implementation == _NAME

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        twin = object.__new__(_Shared)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.layers, twin.pending = copy.deepcopy(self.layers, memo), None
        return twin


class _CacheLayer(CacheLayerMixin):
    """What transformers sees of a layer; the KV itself is a FrozenLayer's or a DenseLayer's."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, kv: FrozenLayer | DenseLayer, shared: _Shared) -> None:
        super().__init__()
        self.kv, self.shared = kv, shared
        self.module: weakref.ref[torch.nn.Module] | None = None  # whose attention it is, known from the first prompt on
        self.is_initialized = True  # nothing to initialise early
        self._coming = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: sizes follow from the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note new keys and values [B, H, T, D]; they enter the cache when the attention function brings the queries."""
        if torch.compiler.is_compiling():  # the operator takes them in
            return key_states, value_states
        shared, layer = self.shared, self.shared.pending
        if layer is not None:
            shared.pending, layer._coming = None, 0
        if self is shared.first():
            shared.check_whole(key_states.shape[2])
        elif layer is not None:
            layer.undo()
            if not shared.attached():
                raise CacheError("the model of this cache does not attend through kvthaw any longer; attach it again")
            raise UnsupportedModelError(
                f"the keys of layer {layer.kv.number} did not reach kvthaw's attention: the model changes them after caching, "
                "or the cache was given to a model that is not attached"
            )
        shared.pending = self
        self._coming = key_states.shape[2]
        key, value = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(key, _TAG, self)
        setattr(value, _TAG, self)
        return key, value

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Attention
    ) -> Tensor:
        """[B, Hq, T, D] for queries [B, Hq, T, D] of the tokens whose keys are given."""
        shared = self.shared
        fresh = shared.pending is self
        shared.pending = None
        self._coming = 0
        pads, steps = self.kv.left_pad, query.shape[2]
        try:
            if id(module) not in shared.modules:
                raise CacheError("this cache belongs to another model")
            self.know(module)
            if self.kv.seen and query.shape[0] != self.kv.lanes:
                raise CacheError(
                    f"the cache holds {self.kv.lanes} rows and was given {query.shape[0]}; use one cache for each batch"
                )
            if mask is not None and not _is_padding(mask):
                raise CacheError("attention_mask is of every query's own; kvthaw takes the 2-D mask of the padding, or none")
            if fresh and (steps > 1 or self.kv.seen == 0 or self.kv.seen in pads):
                pads = shared.left_pads(mask, self.kv, query.shape[0], steps)
                self._check_room(key)
        except KvthawError:
            self.undo()
            raise
        with torch.inference_mode(False), torch.no_grad():
            return self.kv.attend(query, key, value, pads, how, fresh)

    def know(self, module: torch.nn.Module) -> None:
        """This layer's attention is the given module's."""
        if self.module is None:
            self.module = weakref.ref(module)
            if self.shared.settings.method.foresees and module not in _FORESEEING:
                _FORESEEING[module] = module.register_forward_pre_hook(_foresee, with_kwargs=True)

    def undo(self) -> None:
        """Leave nothing of a first prompt that was refused: layers before this one that are not kvthaw's have it already."""
        if self.kv.seen == 0:
            for layer in self.shared.layers:
                layer.reset()

    def _check_room(self, key: Tensor) -> None:
        """Refuse a prompt that is too long, before the first layer takes it in."""
        shared, held, new = self.shared, self.kv.seen, key.shape[2]
        if self is not shared.first():
            return
        if shared.positions is not None and held + new > shared.positions:
            raise ConfigError(f"the prompt has {held + new} tokens; the model's positions end at {shared.positions}")
        if shared.frozen and not shared.settings.method.evicts:
            token = 2 * key[:, :, 0].numel() * key.element_size() * shared.frozen
            limit = shared.settings.host_bytes
            check_host_memory(token * (new if limit is None else held + new), limit)

    def get_seq_length(self) -> int:
        return self.kv.seen + self._coming

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.kv.reset()
        self.shared.pending, self._coming = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; a positive number is the length to keep."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.kv.seen)
        self.kv.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.kv.reorder(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.kv.reorder([lane for lane in range(self.kv.lanes) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        lanes = torch.arange(self.kv.lanes)[indices.cpu()]
        self.kv.reorder(lanes.tolist())

    def offload(self) -> None:
        raise CacheError("kvthaw offloads by itself; use it without cache_implementation='offloaded'")

    prefetch = offload


class Cache(DynamicCache):
    """A KV cache that keeps most of itself frozen on the host; give it to generate() or forward() as past_key_values.

    Takes a DynamicCache of the model and replaces its full-attention layers; sliding-window and linear layers stay as they are.
    Making one sets the model's attention function to kvthaw's, which serves plain caches too; a handle's detach() undoes that.
    No gradients flow through it.

    model: a decoder whose attention goes through transformers' AttentionInterface. method: a name in METHODS or a Method;
    further keyword arguments are the method's options. budget, retrieved, seed, sparse_queries, extent, host_bytes: see
    `kvthaw.cache.plan.Settings`. dense_layers: the first layers, which keep all KV on the device (default: the papers' 2 for
    models of 16 layers and more, else 0).

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
        use_kvthaw_attention(model)
        chosen = resolve(method, **options)
        config = model.config.get_text_config(decoder=True)
        super().__init__(config=config)
        full = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        if not full:
            raise UnsupportedModelError(f"{type(model).__name__} has no full-attention layer whose KV could be offloaded")
        if dense_layers is None:
            dense_layers = 2 if len(self.layers) >= 16 else 0
        if getattr(config, "num_kv_shared_layers", 0):
            sparse_queries = 1  # layers that share KV ask after the index has gone on, so several tokens at once are dense
        self.settings = Settings(chosen, budget, retrieved, dense_layers, seed, sparse_queries, extent, host_bytes)
        frozen = [] if chosen.dense else [i for i in full if i >= dense_layers]
        self.replay: Replay | None = None
        self._shared = _Shared(model, self.settings, len(frozen))
        pipeline, clock, dense_clock = Pipeline(), Clock(), Clock()
        leader: FrozenLayer | None = None
        for i in full:
            kv: FrozenLayer | DenseLayer
            if i not in frozen:
                kv = DenseLayer(i, dense_clock)
            elif chosen.index is None or self._anchors(i, frozen):
                kv = leader = FrozenLayer(i, self.settings, pipeline, clock)
            else:
                if leader is None:
                    raise ConfigError(
                        f"anchors is {chosen.anchors}; layer {i} comes before the first and has nothing to follow"
                    )
                kv = FrozenLayer(i, self.settings, pipeline, clock, leader)
            self.layers[i] = _CacheLayer(kv, self._shared)
        self._shared.layers = self.layers
        if chosen.rotary:
            turns: dict[str, Rotary | None] = {}
            for kv in self.frozen_layers:
                kind = (getattr(config, "layer_types", None) or {kv.number: ""})[kv.number]
                kv.rotary = turns.setdefault(kind, _rotary(model, kind))

    def _anchors(self, layer: int, frozen: list[int]) -> bool:
        anchors = self.settings.method.anchors
        if isinstance(anchors, int):
            return frozen.index(layer) % anchors == 0
        shares = [int(a * len(self.layers)) for a in anchors if isinstance(a, float)]
        return layer in anchors or layer in shares or (bool(shares) and layer == frozen[0])

    @property
    def kv_layers(self) -> list[FrozenLayer | DenseLayer]:
        """The layers that kvthaw serves, in order."""
        return [layer.kv for layer in self.layers if isinstance(layer, _CacheLayer)]

    @property
    def frozen_layers(self) -> list[FrozenLayer]:
        """Those of them whose KV is offloaded or evicted."""
        return [kv for kv in self.kv_layers if isinstance(kv, FrozenLayer)]

    def wait(self) -> None:
        """Until every token is offloaded and indexed; raises what went wrong on the way."""
        for kv in self.frozen_layers:
            kv.settle()

    def fork(self, method: str | Method, **settings: Any) -> Cache:
        """A cache of the same tokens under another method or budget (one prefill serves many). Settings as in the constructor;
        those not given are this cache's, the budget included. The two are independent afterwards."""
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
            if isinstance(layer, _CacheLayer):
                twin.layers[i].kv.copy_from(layer.kv)
                module = None if layer.module is None else layer.module()
                if module is not None:
                    twin.layers[i].know(module)
            else:
                twin.layers[i] = copy.deepcopy(layer)  # in place: twin._shared has the same list
        return twin

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
            attended_mean=None if attended is None else attended + (retrieved or 0.0),
            attended_max=max((kv.held_max for kv in frozen), default=0) + most if held_steps else None,
            retrieved=retrieved,
            hit_rate=1 - fetched / selected if selected else None,
            fetched_bytes=fetched_bytes,
            kv_device_bytes=sum(kv.device_bytes() for kv in frozen),
            kv_dense_bytes=sum(kv.device_bytes() for kv in layers if isinstance(kv, DenseLayer)),
            kv_host_bytes=sum(kv.host_bytes() for kv in frozen),
        )


class Handle:
    """An attached model. Every generate() or forward() that would make a plain cache gets a kvthaw cache instead."""

    def __init__(self, model: PreTrainedModel, make: Callable[[], Cache], capture: bool, compiled: bool) -> None:
        self._model: PreTrainedModel | None = model
        self._make = make
        self._cache: Cache | None = None
        _ATTACHED.add(model)
        self._hook = model.register_forward_pre_hook(self._supply, with_kwargs=True)
        self._capture = capture
        if capture:
            model.forward = replaying(model.forward, self._behind, compiled=compiled)

    @property
    def cache(self) -> Cache:
        """The cache of the latest generate(). Raises CacheError before the first and after detach."""
        self._open()
        if self._cache is None:
            raise CacheError("nothing was generated yet")
        return self._cache

    def stats(self) -> Stats:
        """Stats of the latest generate()'s cache."""
        return self.cache.stats()

    def detach(self) -> None:
        """Give the model its own attention and caches back."""
        model = self._open()
        self._hook.remove()
        if self._capture:
            del model.forward
        for module in model.modules():
            hook = _FORESEEING.pop(module, None)
            if hook is not None:
                hook.remove()
        model.set_attn_implementation(_BEFORE[model])
        _ATTACHED.discard(model)
        self._model = self._cache = None

    def __enter__(self) -> Handle:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self.detach()

    def _open(self) -> PreTrainedModel:
        if self._model is None:
            raise CacheError("this handle is closed; attach the model again")
        return self._model

    def _behind(self, given: Any) -> Cache | None:
        """The cache whose layers a past_key_values has."""
        if isinstance(given, Cache):
            return given
        ours = self._cache is not None and getattr(given, "layers", None) is self._cache.layers
        return self._cache if ours else None

    def _supply(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("past_key_values")
        if given is None:
            config = module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
            use = kwargs.get("use_cache")
            if not (getattr(config, "use_cache", True) if use is None else use):
                return None
            self._cache = self._make()
            return args, {**kwargs, "past_key_values": self._cache}
        if type(given) is DynamicCache:
            if getattr(given, "offloading", False):
                raise CacheError("cache_implementation='offloaded' does not go with kvthaw, which offloads by itself")
            if given.get_seq_length() == 0 and not any(isinstance(layer, _CacheLayer) for layer in given.layers):
                self._cache = self._make()
                for i, layer in enumerate(given.layers):  # those that are not kvthaw's may have been prepared already
                    if not isinstance(self._cache.layers[i], _CacheLayer):
                        self._cache.layers[i] = layer
                given.layers = self._cache.layers  # generate() keeps its own object; from here on the two are one
        elif isinstance(given, Cache):
            self._cache = given
        else:
            raise CacheError(f"past_key_values is a {type(given).__name__}; kvthaw works with its own Cache or a DynamicCache")
        return None


def attach(
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
    capture: bool = True,
    compile: bool = False,
    **options: Any,
) -> Handle:
    """Let a model attend to a frozen context: from now on plain generate() and pipeline() thaw only what each step needs.

    Arguments as for `Cache`. capture: on a GPU, with a method that decides there, replay decoding steps as one captured CUDA graph;
    other steps, and everything on a CPU, run eagerly. compile: the captured step is compiled by torch.compile first (a minute or
    more, once). Returns a handle, also a context manager; handle.detach() undoes everything.

    Example: ``with kvthaw.attach(model, "icecache", budget=256): model.generate(**inputs)``
    """
    if model in _ATTACHED:
        raise CacheError("the model is attached already; detach its handle first")
    before = model.config._attn_implementation

    def make() -> Cache:
        return Cache(
            model,
            method,
            budget=budget,
            retrieved=retrieved,
            dense_layers=dense_layers,
            seed=seed,
            sparse_queries=sparse_queries,
            extent=extent,
            host_bytes=host_bytes,
            **options,
        )

    try:
        make()  # refuse bad settings now, not at the first token
    except Exception:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        raise
    return Handle(model, make, capture, compile)


def use_kvthaw_attention(model: PreTrainedModel) -> None:
    """Set the model's attention function to kvthaw's. Raises UnsupportedModelError, with the reason, where that cannot work."""
    name, config = type(model).__name__, model.config
    text = config.get_text_config(decoder=True)
    if text._attn_implementation == _NAME:
        return
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; kvthaw serves decoders")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(f"{name} uses multi-head latent attention, whose cached keys are not the keys attended to")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not use transformers' AttentionInterface, through which kvthaw attends")
    ops.register()
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    before = config._attn_implementation
    model.set_attn_implementation(_NAME)
    if text._attn_implementation != _NAME:
        model.set_attn_implementation(before)
        raise UnsupportedModelError(f"{name} did not take kvthaw's attention function")
    _BEFORE[model] = before


def _foresee(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a layer's attention: give its input to the next layer's, and keep the query that comes of it for the index there."""
    for name, given in kwargs.items():
        ours = [layer for layer in getattr(given, "layers", []) if isinstance(layer, _CacheLayer)]
        if not ours or not ours[0].shared.settings.method.foresees:
            continue
        at = next((i for i, layer in enumerate(ours) if layer.module is not None and layer.module() is module), len(ours))
        kv, following = (ours[at + 1].kv, ours[at + 1].module) if at + 1 < len(ours) else (None, None)
        hidden = args[0] if args else kwargs["hidden_states"]
        if following is None or not isinstance(kv, FrozenLayer) or hidden.shape[1] > kv.settings.sparse_queries:
            continue
        attention, asked = following(), list[Tensor]()
        assert attention is not None
        with torch.no_grad():
            attention(*args, **{**kwargs, name: None, "kvthaw_asked": asked})
        if not asked:
            raise UnsupportedModelError(f"{type(attention).__name__} cannot be asked what its query would be")
        kv.foreseen = asked[0]


def _rotary(model: PreTrainedModel, kind: str) -> Rotary | None:
    """The turns that a model gives keys in layers of a kind (of its config's layer_types); None without rotary positions."""
    found = [m for name, m in model.get_decoder().named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if not found:
        return None
    module = found[0]
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None or [*inspect.signature(apply).parameters][:4] != ["q", "k", "cos", "sin"]:
        raise UnsupportedModelError(f"{type(model).__name__} turns its keys in a way of its own, which kvthaw cannot undo")
    kinds = (kind,) if "layer_type" in inspect.signature(module.forward).parameters else ()

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = module(torch.empty(0, dtype=model.dtype, device=positions.device), positions, *kinds)
        return cos, sin

    return Rotary(angles, apply)


def _mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Plain causal layers get the padding mask as [B, 1, 1, n]: no sync, no [q, n] tensor. Others get sdpa's [B, 1, q, n]."""
    if mask_function is causal_mask_function:
        mask: Tensor | None = kwargs.get("attention_mask")
        return None if mask is None else mask[:, None, None]
    full: Tensor | None = sdpa_mask(*args, mask_function=mask_function, **kwargs)
    return full


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. query [B, Hq, T, D], key and value [B, H, n, D]; returns ([B, T, Hq, D], None)."""
    asked: list[Tensor] | None = kwargs.get("kvthaw_asked")
    if asked is not None:
        asked.append(query)
        return query.transpose(1, 2).contiguous(), None
    how = Attention(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"), kwargs.get("s_aux"))
    if torch.compiler.is_compiling():
        attended = torch.ops.kvthaw.attend(query, key, value, module.layer_idx, how.scale, how.softcap, how.sinks)
        return attended.transpose(1, 2).contiguous(), None
    layer: _CacheLayer | None = getattr(key, _TAG, None)
    if layer is not getattr(value, _TAG, None):
        raise UnsupportedModelError(f"{type(module).__name__} changes keys or values after caching them")
    if layer is not None:
        return layer.attend(module, query, key, value, attention_mask, how).transpose(1, 2).contiguous(), None
    if attention_mask is not None and _is_padding(attention_mask):
        attention_mask = _causal(attention_mask, query.shape[2], key.shape[2])
    causal = kwargs.get("is_causal")
    if (
        attention_mask is None
        and 1 < query.shape[2] < key.shape[2]
        and (getattr(module, "is_causal", True) if causal is None else causal)
    ):
        attention_mask = _causal(query.new_ones((1, 1, 1, key.shape[2]), dtype=torch.bool), query.shape[2], key.shape[2])
    if how.softcap is None and how.sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=how.scale, is_causal=causal
        )
        return out, None
    return _masked(query, key, value, attention_mask, how).transpose(1, 2).contiguous(), None


def _is_padding(mask: Tensor) -> bool:
    """Whether a mask is one for all queries, as _mask() makes it."""
    return mask.ndim == 4 and mask.shape[2] == 1 and mask.dtype == torch.bool


def _causal(mask: Tensor, steps: int, n: int) -> Tensor:
    """The causal bool mask [B, 1, q, n] of a padding mask, for a layer that is not kvthaw's."""
    causal = torch.ones(steps, n, dtype=torch.bool, device=mask.device).tril(n - steps)
    return causal[None, None] & mask[..., -n:]


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Attention) -> Tensor:
    """Attention with softcap or sinks for sliding-window layers, which are short. mask [B, 1, T, n] bool or None (causal)."""
    steps, n = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(steps, n, dtype=torch.bool, device=query.device).tril(n - steps)[None, None]
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).float() for x in (key, value))
    scores = query.float() @ key.transpose(2, 3) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return with_sinks(weights @ value, lse, how.sinks).to(query.dtype)
