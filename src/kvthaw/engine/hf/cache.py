"""A KV cache that transformers accepts as past_key_values."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvthaw.cache.chooser import offloaded_numbers
from kvthaw.cache.device_layers import WindowLayer
from kvthaw.cache.index_api import Index, Method, Rotary
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.passes import reserve
from kvthaw.cache.plan import Needs, Settings, default_block_size, no_effect, stays_on_host, try_index
from kvthaw.cache.stats import Stats
from kvthaw.config import SETTINGS, CacheConfig, Crossing, KvDtype
from kvthaw.engine.graph_runner import CapturedSteps
from kvthaw.engine.hf import saving
from kvthaw.engine.hf.attention import unwrap, use_kvthaw_attention
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.dry_run import dry_run, that_fits
from kvthaw.engine.hf.hooks import prefetch, rotary, turns_by_length
from kvthaw.engine.hf.identity import Origin, adapters
from kvthaw.engine.hf.layer import CacheLayer, Layers, Shared, WindowCacheLayer
from kvthaw.engine.hf.masks import as_bool
from kvthaw.engine.hf.model import head_dim, kv_heads, of_layer
from kvthaw.engine.hf.tensor_parallel import ranks
from kvthaw.errors import CacheError, UnsupportedModelError, at_least
from kvthaw.formatting import counted, human
from kvthaw.kernels.local import Span
from kvthaw.kernels.row_format import row_format
from kvthaw.method_names import AUTO
from kvthaw.methods.auto import candidates, find
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)


def check_settings(config: PreTrainedConfig, method: str | Method, given: CacheConfig) -> None:
    """Raise ConfigError, before weights are read, for a method and settings that no cache of a model with this configuration
    takes."""
    config = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    chosen, full = find(method, torch.device("cpu")), _full(layers)
    if full and not chosen.dense:
        dense_layers = _dense_layers(chosen, given, len(layers))
        offloaded_numbers(Settings.of(chosen, given, dense_layers=dense_layers), full, len(layers))
        for dim in {head_dim(of_layer(config, number)) for number in full}:
            try_index(chosen, dim)


def _full(layers: Sequence[CacheLayerMixin]) -> list[int]:
    """Return the numbers of the full-attention layers."""
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def _dense_layers(chosen: Method, given: CacheConfig, depth: int) -> int:
    return chosen.dense_layers * (depth >= 16) if given.dense_layers is None else given.dense_layers


class Cache(DynamicCache):
    """A KV cache that keeps most KV frozen on the host. Pass it to generate() or forward() as past_key_values, which
    transformers calls cache from 5.24 on.

    Takes a DynamicCache of the model and replaces its full-attention layers; sliding-window and linear layers are
    unchanged. Creating one sets the model's attention function to kvthaw's, which serves plain caches too;
    `kvthaw.detach(model)` undoes that. No gradients flow through it.

    model: a decoder whose attention goes through transformers' AttentionInterface.
    method: a name in METHODS or a Method. Further keyword arguments are the method's options. "auto" takes full attention
        while all KV lies on the device and measurements say that it is faster (`kvthaw.methods.auto`). Then "auto" takes
        the best index: thaw on a GPU, icecache-digest:remainder=64 on a CPU. It takes the next of pariskv-plus, clusterkv-plus and
        icecache-digest if an index does not fit a GPU together with the weights. It sets device_memory to "auto" unless the
        caller gives one.
    sized_for: how many sequences must fit, the prompt tokens of each, and the tokens after them. None: one sequence of all
        positions of the model, at most 131,072.

    The arguments budget to kv_dtype are described in `kvthaw.config.CacheConfig`. Under "auto", full_below None means the
    measured crossing.

    `Stats.method` and `Stats.reason` report what is in force and why. The log reports changes.

    For assisted decoding, attach the model: kvthaw must see the forward's arguments to distinguish candidates from a
    question.

    A setting that changes nothing under the method is accepted, such as device_memory if the host searches.
    `Stats.no_effect` and the log report it with the reason.

    Raises CacheError, with the layer, if the model gives keys or values that are not finite: see `check_finite`.
    Raises ConfigError for a setting out of range and UnsupportedModelError for a model that cannot work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = AUTO,
        *,
        budget: int | float | None = None,
        retrieved: int | float | None = None,
        dense_layers: int | None = None,
        seed: int = 0,
        sparse_queries: int = 16,
        block_size: int | None = None,
        host_bytes: int | None = None,
        device_memory: int | str | None = None,
        full_below: int | Crossing | None = None,
        kv_dtype: KvDtype | None = None,
        sized_for: tuple[int, int, int] | None = None,
        **options: Any,
    ) -> None:
        self.config = given = CacheConfig.split(locals() | options)[0]
        if options.get("config") is given:
            del options["config"]
        model = unwrap(model)
        use_kvthaw_attention(model)
        methods, crossing = candidates(method, model.device, **options)
        config = model.config.get_text_config(decoder=True)
        super().__init__(config=config)
        self.layers: Layers = Layers(self.layers)
        full = _full(self.layers)
        if not full:
            raise UnsupportedModelError(f"{type(model).__name__} has no full-attention layer whose KV could be offloaded")
        self._sized_for = sized_for
        softcap = getattr(config, "attn_logit_softcapping", None)
        if softcap is not None and len(methods) > 1:
            indexes = [(each, try_index(each, 64)) for each in methods]
            methods = [each for each, index in indexes if index is None or not index.traits.attends]
        chosen, self._passed_over = methods[0], ""
        if len(methods) > 1:

            def needs(method: Method, device_memory: int, size: tuple[int, int, int]) -> Needs:
                cache = Cache(model, method, config=replace(given, device_memory=device_memory, full_below=None))
                return cache.needs(*size, pinned=model.device.type == "cuda")

            chosen, self._passed_over = that_fits(model, methods, full, sized_for, given, needs)
        self.shares_kv = bool(getattr(config, "num_kv_shared_layers", 0))
        processes, layer = ranks(model), of_layer(config, full[0])
        heads = kv_heads(layer) // processes.all_heads(1)
        row_bytes = row_format(given.kv_dtype or chosen.kv_dtype, head_dim(layer), model.dtype).row_bytes
        known = given.crossing or crossing
        resolved = {
            "dense_layers": _dense_layers(chosen, given, len(self.layers)),
            # Layers that share KV ask after the index has gone on, so several tokens at once are dense.
            "sparse_queries": 1 if self.shares_kv else given.sparse_queries,
            "block_size": given.block_size or default_block_size(heads * row_bytes),
            "device_memory": "auto" if crossing is not None and given.device_memory is None else given.device_memory,
            "full_below": known and known.on(2 * heads * head_dim(layer) * model.dtype.itemsize, model.device),
        }
        self.settings = Settings.of(chosen, given, ranks=processes, **resolved)
        self.kv = KVCache(self.settings, full, len(self.layers), self._windows(config))
        if len(full) == len(self.layers):
            self.kv.origin = Origin(model)
        index: Index | None = None
        for dim in {head_dim(of_layer(config, layer.number)) for layer in self.kv.chooser.by_method.values()}:
            index = try_index(chosen, dim, model.dtype, softcap)
        self.blocks_stay = stays_on_host(chosen, index, model.device)
        """Why blocks stay on the host even if the device has room; None if they need not."""
        self.searches_on_host = index is not None and index.traits.on_host
        self._no_effect = no_effect(given, self.settings, self.blocks_stay, full, model.device)
        for name, why in self._no_effect.items():
            _log.info("%s has no effect: %s", name, why)
        self.replay: CapturedSteps | None = None
        self.rolls_back = False
        """Whether a forward that asks for several logits may be a verification of assisted decoding."""
        self.argument, self.turns_by_length = CACHE, turns_by_length(model)
        self._shared = Shared(model, self.kv, prefetch if chosen.prefetches else None)
        self._shared.of = weakref.ref(self.layers)
        self.kv.sequences.positions = self._shared.positions
        for kv in self.kv.layers:
            self.layers[kv.number] = (WindowCacheLayer if isinstance(kv, WindowLayer) else CacheLayer)(kv, self._shared)
        if chosen.rotary:
            turns: dict[str, Rotary | None] = {}
            for layer in self.kv.chooser.by_method.values():
                kind = (getattr(config, "layer_types", None) or {layer.number: ""})[layer.number]
                layer.rotary = turns.setdefault(kind, rotary(model, kind))

    def _windows(self, config: Any) -> dict[int, Span]:
        """Return the sliding-window layers that kvthaw serves, with their spans: none here, transformers serves them."""
        return {}

    @property
    def model(self) -> PreTrainedModel:
        """The model of this cache. Raises CacheError if it is gone."""
        model = self._shared.model()
        if model is None:
            raise CacheError("the model of this cache is gone")
        return model

    def adapters(self) -> object:
        """Return the adapters that change the model's outputs now, with their scales. Two results compare equal if these are."""
        return adapters(self.model)

    @property
    def reordered(self) -> bool:
        """Whether sequences changed places between steps, as beams do."""
        return self._shared.reordered

    @property
    def foreign(self) -> list[str]:
        """Types of layers that are neither kvthaw's nor plain attention. A later chunk may not be able to continue their
        state.

        Layers that share another layer's KV hold none, so they do not count.
        """
        plain = (CacheLayer, DynamicLayer, DynamicSlidingWindowLayer)
        held = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)]
        return [type(layer).__name__ for layer in held if type(layer) not in plain]

    @property
    def prefills_whole(self) -> bool:
        """Whether a prompt must go through the model at once: linear attention may not continue after a chunk."""
        return bool(self.foreign)

    def prompt(self, tokens: int) -> AbstractContextManager[None]:
        """Context in which the next `tokens` tokens of each row, padding included, are one prompt in chunks of any size.

        A prompt that does not fit is refused with its first chunk. All its tokens attend densely. Indexes that are better
        built at once are built with the last chunk.
        """
        return self.kv.sequences.prompt(tokens)

    def activate_past_recording(self) -> None:
        """Expect a crop after each forward: generate() calls this before assisted decoding."""
        super().activate_past_recording()
        self.rolls_back = True

    @torch.inference_mode(False)  # blocks outlive the caller's mode
    def reserve(self, tokens: int) -> None:
        """Allocate the host memory of the next tokens, if they are decoded through the index. Raises HostMemoryError before
        anything changes."""
        reserve(self.kv.offloaded, self.kv.sequences, tokens)

    def check_finite(self) -> None:
        """Raise CacheError, with the layer, if the model gave keys or values that are not finite while decoding.

        On a CPU this call reports the latest step. On a GPU it reports some steps later, since the host does not wait.
        crop() and reset() clear the error.
        """
        self.kv.finite.look(self.kv.layers)

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Context in which new tokens are candidates of assisted decoding: each is decoded through the index, however many
        there are."""
        self.kv.sequences.verifying = True
        try:
            yield
        finally:
            self.kv.sequences.verifying = False

    def check_mask(self, mask: Tensor) -> None:
        """Raise CacheError for a mask, [B, n] or [B, 1, 1, n], that does not fit a step of one token."""
        sequences = self.kv.sequences
        own = mask[:, None, None].bool() if mask.ndim == 2 else as_bool(mask)
        self._shared.masks.read(own, self._shared.padding or [0] * sequences.count, sequences.padded_length, 1)

    def reset(self) -> None:
        """Drop all tokens, and the captured step with the tensors that it reads."""
        self._shared.empty_others()
        super().reset()
        self.replay = None

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.kv.wait()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens. A positive number means what it means in the installed transformers.

        Raises CacheError, with every layer unchanged, if a layer cannot.
        """
        self._shared.check_crop(max(0, -int(tokens_to_remove)))  # before any layer, also one of transformers' own
        super().crop(tokens_to_remove)

    def keep(self, length: int) -> None:
        """Keep the first `length` tokens of every row, padding included, and drop the rest.

        Raises CacheError, with every layer unchanged, if a layer cannot.
        """
        check_type(int, length=length)
        at_least(0, length=length)
        if length < self.get_seq_length():  # a sliding window of transformers' own cannot even crop(0)
            self.crop(length - self.get_seq_length())

    def __repr__(self) -> str:
        layers, sequences = self.kv.layers, self.kv.sequences
        device, host = sum(kv.device_bytes() for kv in layers), sum(kv.host_bytes() for kv in layers)
        rows = f" in each of {sequences.count} rows" if sequences.count > 1 else ""
        tokens = f"{counted(sequences.padded_length, 'token')}{rows}"
        return f"<Cache: {self.settings}; {tokens}; KV {human(device)} on the device, {human(host)} on the host>"

    @torch.inference_mode(False)
    def fork(self, method: str | Method, **settings: Any) -> Cache:
        """Return a cache with the same tokens under another method or budget, so that one prefill serves many.

        The two caches are independent afterwards. Rows of a dense cache are offloaded once for all its forks, and stay on
        the host with that cache.

        settings: as for the constructor. Settings not given are inherited, the budget included. dense_layers is the
            method's unless this cache was given it.
        """
        model, mine = self.model, self.settings
        kv_dtype = None if find(method, model.device).dense else mine.kv_dtype
        own: dict[str, Any] = {"block_size": mine.block_size, "device_memory": mine.device_memory, "kv_dtype": kv_dtype}
        if "budget" in settings or "retrieved" in settings:
            own |= {"budget": None, "retrieved": None}
        own |= {"full_below": None} | {name: settings.pop(name) for name in SETTINGS if name in settings}
        twin = Cache(model, method, **{"sized_for": self._sized_for, "config": replace(self.config, **own), **settings})
        self.kv.rollback_failed_step()
        twin.kv.clone(self.kv.sequences, self.kv.layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, CacheLayer):
                twin.layers[i] = copy.deepcopy(layer)  # in place: twin._shared has the same list
        twin._know_as(self)
        return twin

    def save(self, path: str | Path, token_ids: Tensor | Sequence[int]) -> None:
        """Save the keys and values of all tokens in a folder, and replace the folder if it exists.

        IceCache's trees, which are slow to build, are saved for loading under the same method and options. Other indexes
        are rebuilt under any method, and the log says so. A crash at any time leaves the old folder, none, or the new one.

        Raises CacheError for other token ids, if tokens have been evicted, or if layers have another kind of state.

        token_ids: the tokens in the cache, [T], or [B, T] with padding. load() compares a prompt with them.
        """
        if self.foreign:
            raise CacheError(f"the model has a {self.foreign[0]}, whose state cannot be saved")
        saving.save(self.model, self.kv, self.layers, Path(path), torch.as_tensor(token_ids))

    @classmethod
    @torch.inference_mode(False)
    def load(cls, path: str | Path, model: PreTrainedModel, method: str | Method = AUTO, **settings: Any) -> Cache:
        """Return a cache with the tokens of a saved folder. Arguments as for the constructor.

        Raises CacheError for a folder that is damaged in any way, and for another model: class, config, dtype or weights.
        Nothing is loaded then.
        """
        cache = cls(model, method, **settings)
        saving.load(cache.model, cache.kv, cache.layers, Path(path))
        return cache

    @staticmethod
    def saved_tokens(path: str | Path) -> Tensor:
        """Return the token ids [B, T] that a saved cache holds. Raises CacheError for a damaged folder."""
        return torch.tensor(saving.read_header(Path(path))["token_ids"])

    def _know_as(self, other: Cache) -> None:
        for mine, its in zip(self.layers, other.layers, strict=True):
            module = its.module() if isinstance(its, CacheLayer) and its.module is not None else None
            if module is not None and isinstance(mine, CacheLayer):
                mine.remember_module(module)

    def needs(self, batch: int, prompt: int, new_tokens: int, *, pinned: bool) -> Needs:
        """Return the memory of an empty cache for `batch` prompts of `prompt` tokens and answers of at most `new_tokens`.

        The cache is unusable afterwards. Raises CacheError if it has tokens, which it counts after a first call.

        pinned: whether the cache pins its host memory.
        """
        if self.kv.sequences.padded_length:
            raise CacheError(f"the cache has {self.kv.sequences.padded_length:,} tokens; needs() takes a new one each time")
        return dry_run(self.model, self.kv, self.layers, batch, prompt, new_tokens, pinned=pinned)

    def stats(self) -> Stats:
        """Return statistics of the cache's content and work. Waits for the device."""
        stats, replay = replace(self.kv.stats(), no_effect=dict(self._no_effect)), self.replay
        if self._passed_over and stats.method == self.settings.method.name:
            stats = replace(stats, reason="; ".join(filter(None, (stats.reason, self._passed_over))))
        if replay is None:
            return stats
        return replace(
            stats, captures=replay.captures, capture_seconds=replay.capture_seconds, capture_bytes=replay.capture_bytes
        )


def sequence_bytes(model: PreTrainedModel, method: str | Method, capacity: int, config: CacheConfig) -> int:
    """Return the device bytes that a sequence of a running batch takes under the method, with its rows on the host."""
    cache = Cache(model, method, config=replace(config, full_below=0, device_memory=0))
    cache.kv.sequences.room = capacity
    return cache.needs(1, capacity, 0, pinned=False).device
