"""A layer of kvthaw's cache as transformers sees it, and the attention function that transformers calls.

The function receives q, k, v after RoPE, but neither the cache nor the layer. `CacheLayer.update` therefore tags the keys
and values that it returns with itself.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams, LayerKV
from kvthaw.cache.passes import check_memory, reserve
from kvthaw.engine.hf.masks import Masks, as_bool, attention_by_mask, dense_attention
from kvthaw.errors import CacheError, ConfigError, KvthawError, UnsupportedModelError
from kvthaw.kernels.row_format import row_format

NAME = "kvthaw"
"""The name of kvthaw's attention function in transformers."""
BEFORE = "_kvthaw_before"
"""The model attribute that keeps the names of the attention from before kvthaw's, by sub-config. A copy of the model has it."""
FLASH_ATTENTION_4 = "flash_attention_4"
"""The name of FlashAttention 4 in transformers."""
TAG = "_kvthaw_layer"
"""The attribute of keys and values that names the layer they came from."""


class QueryAskedError(Exception):
    """Ends an attention module's forward that was asked for its query alone, [B, Hq, T, D]."""

    def __init__(self, query: Tensor) -> None:
        super().__init__()
        self.query = query


def uses_flash_attention_4(model: PreTrainedModel) -> bool:
    """Return whether a model that attends through kvthaw was loaded with FlashAttention 4, by which its prompts then attend."""
    before: dict[str, str] = getattr(model, BEFORE, {})
    return before.get("text_config", before.get("")) == FLASH_ATTENTION_4


class Layers(list[Any]):
    """The layers of a cache, in a list that its layers can reference weakly."""


class Shared:
    """State that the layers of one cache share: the KV cache, the layer that waits for its query, the padding, the modules."""

    def __init__(self, model: PreTrainedModel, kv: KVCache, meet: Callable[[torch.nn.Module], None] | None) -> None:
        self.model, self.kv = weakref.ref(model), kv
        self.modules = {id(module) for module in model.modules()}
        self.flash4 = uses_flash_attention_4(model)
        self.positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.meet = meet  # called with each attention module when it is first seen
        self.of = weakref.ref(Layers())  # the cache's own list of its layers, whose elements hold this object
        self.pending: CacheLayer | None = None
        self.reordered = False  # sequences changed places between steps (beam search)
        self.masks = Masks()

    @property
    def length(self) -> int:
        """Tokens of the cache with padding, or of the sequence being prefilled, as transformers counts them.

        Tokens of a step count once all layers have attended.
        """
        sequences = self.kv.sequences
        return sequences.past if sequences.filling else sequences.padded_length

    @property
    def padding(self) -> list[int]:
        """The left padding of each row; none before the first prompt."""
        sequences = self.kv.sequences
        return [0] if sequences.filling else list(sequences.left_pad)

    @property
    def layers(self) -> Layers:
        """The layers of the cache; none once it is gone."""
        return self.of() or Layers()

    def check_others(self, tokens: int) -> None:
        """Raise CacheError if layers that are not kvthaw's counted the tokens of a failed step. Called when kvthaw's first
        layer gets tokens.

        transformers counts a layer's tokens when the layer receives them.
        """
        layers, failed = self.layers, self.kv.sequences.step is not None
        first = next(i for i, layer in enumerate(layers) if isinstance(layer, CacheLayer))
        for i, layer in enumerate(layers):
            if isinstance(layer, CacheLayer):
                continue
            expected = self.length + (tokens if i < first else 0)
            held = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else None
            if held not in (expected, 0, None) or (held is None and failed and hasattr(layer, "recurrent_states")):
                tokens_held = "a state" if held is None else f"{held} tokens"
                raise CacheError(
                    f"layer {i} holds {tokens_held} and layer {first} {self.length}: a forward was interrupted; reset() the cache"
                )

    def check_crop(self, drop: int) -> None:
        """Raise CacheError if some layer cannot drop its last `drop` tokens, before any layer changes."""
        self.kv.check_crop(drop)
        for i, layer in enumerate(self.layers):
            if drop and not isinstance(layer, CacheLayer) and not getattr(layer, "record_past", True):
                window = getattr(layer, "sliding_window", None)  # linear layers have none, and keep one state
                if window is None or layer.get_seq_length() >= window:
                    raise CacheError(
                        f"layer {i} is a {type(layer).__name__}, which has dropped what crop({-drop}) would bring back"
                    )

    def empty_others(self) -> None:
        """Mark transformers' own attention layers as empty after reset(). Until 5.23, reset() leaves zeros in place of keys."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                layer.is_initialized = False

    def forget(self) -> None:
        """Forget notes about tokens that are gone."""
        self.pending, self.reordered, self.masks = None, False, Masks()

    def check_attached(self) -> None:
        """Raise CacheError if the model of this cache does not attend through kvthaw."""
        model = self.model()
        if model is None or model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise CacheError("the model of this cache does not attend through kvthaw any longer; attach it again")

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        twin = object.__new__(Shared)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.kv = copy.deepcopy(self.kv, memo)
        twin.masks = Masks()
        twin.of, twin.pending = weakref.ref(copy.deepcopy(self.layers, memo)), None
        return twin


def _kept(held: int, tokens_to_remove: int) -> int:
    """Return how many of `held` tokens a cache layer of transformers keeps after crop(tokens_to_remove)."""
    layer, empty = DynamicLayer(), torch.empty(1, 1, held, 1)
    layer.update(empty, empty)
    try:
        layer.crop(tokens_to_remove)
    except ValueError as error:
        raise ConfigError(
            f"crop({tokens_to_remove}): a positive number is refused by the installed transformers; crop({-tokens_to_remove}) "
            f"removes {tokens_to_remove} tokens, keep({tokens_to_remove}) keeps the first {tokens_to_remove}"
        ) from error
    kept: int = layer.get_seq_length()
    return kept


class TaggingLayer(CacheLayerMixin):
    """A layer that gets its new keys and values back from kvthaw's attention function, together with the queries."""

    is_sliding = False
    is_compileable = False
    flash4: bool
    """Whether prompts attend by FlashAttention 4."""

    def tagged(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of new keys and values that name this layer: the attention function calls its attend()."""
        views = keys.view_as(keys), values.view_as(values)
        for view in views:
            setattr(view, TAG, self)
        return views

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: sizes follow from the first tokens."""

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class CacheLayer(TaggingLayer):
    """A layer as transformers sees it. transformers calls every layer for operations on the whole cache; only the first one
    acts."""

    is_croppable = True

    def __init__(self, kv: LayerKV, shared: Shared) -> None:
        super().__init__()
        self.number, self.shared, self.flash4 = kv.number, shared, shared.flash4
        self.module: weakref.ref[torch.nn.Module] | None = None  # the layer's attention module, known from the first prompt on
        self.is_initialized = True  # nothing to initialise early
        self.first = kv.number == shared.kv.layers[0].number
        """Whether this is the first of kvthaw's layers."""

    @property
    def kv(self) -> LayerKV:
        """The layer of the KV cache that is in force."""
        return self.shared.kv.layer(self.number)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tag new keys and values [B, H, T, D]. They enter the cache when the attention function is called with the queries."""
        if torch.compiler.is_compiling():
            _refuse_compilation()
        shared, layer = self.shared, self.shared.pending
        shared.pending = None
        if self.first:
            shared.check_others(key_states.shape[2])
        elif layer is not None:
            layer.undo()
            shared.check_attached()
            raise UnsupportedModelError(
                f"the keys of layer {layer.kv.number} did not reach kvthaw's attention: the model changes them after caching, "
                "or the cache was given to a model that is not attached"
            )
        shared.pending = self
        return self.tagged(key_states, value_states)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attention: AttentionParams,
    ) -> Tensor:
        """Return the attention output [B, Hq, T, D] for queries [B, Hq, T, D] of the tokens whose keys are given."""
        shared, cache = self.shared, self.shared.kv
        new = shared.pending is self
        shared.pending = None
        batch, _, steps, _ = query.shape
        held = shared.length
        before = held if new or cache.sequences.step is not None else held - steps
        try:
            if query.requires_grad:
                raise CacheError(
                    "gradients are on, and none flow through kvthaw's attention; call the model under torch.no_grad(), or train it "
                    "with use_cache=False"
                )
            if id(module) not in shared.modules:
                raise CacheError("this cache belongs to another model")
            self.remember_module(module)
            if held and self.first:
                self._check_rows(batch)
            if mask is not None:  # in a batch nothing is padded; some models still make a mask of ones (OPT, until 5.23)
                mask = None if cache.sequences.room or not cache.reads_masks else as_bool(mask)
            pads, own = shared.padding or [0] * batch, False
            if mask is not None:
                pads, own = shared.masks.read(mask, pads, before, steps)
            if new and self.first:
                self.check(key, pads, before)
        except KvthawError:
            self.undo()
            raise
        with torch.inference_mode(False), torch.no_grad():
            if new:
                alone = cache.sequences.filling and cache.sequences.count > 1  # prompts among other sequences
                out = cache.attend(self.kv, query, key, value, attention, None if alone else pads)
            else:
                out = cache.attend_again(self.kv, query, key, value, attention)
            return out if mask is None or not own else attention_by_mask(query, key, value, mask[:, :, -steps:], attention)

    def _check_rows(self, batch: int) -> None:
        """Raise CacheError unless a step has a row for each sequence. A running batch may leave out its last sequences."""
        sequences = self.shared.kv.sequences
        count = 1 if sequences.filling else sequences.count
        if batch != count and not (sequences.room and not sequences.filling and batch < count):
            raise CacheError(f"the cache holds {count} rows and was given {batch}; use one cache for each batch")

    def check(self, key: Tensor, pads: list[int], before: int) -> None:
        """Raise the errors of a step that are known before the first layer stores its tokens, and reserve blocks for them.

        key: [B, H, T, D].
        pads: left padding of each row.
        before: tokens before them.
        """
        cache, steps = self.shared.kv, key.shape[2]
        if steps > 1 or before == 0:
            self._check_room(key, pads)
        if not cache.sequences.room:  # a running batch fails the request alone
            cache.finite.look(cache.layers)
        with torch.inference_mode(False):
            reserve(cache.offloaded, cache.sequences, steps)

    def remember_module(self, module: torch.nn.Module) -> None:
        """Remember the attention module of this layer."""
        if self.module is None:
            self.module = weakref.ref(module)
            if self.shared.meet is not None:
                self.shared.meet(module)

    def undo(self) -> None:
        """Reset the cache if its first prompt was refused, because earlier layers that are not kvthaw's hold it already."""
        if self.shared.length == 0 and not self.shared.kv.sequences.filling:
            self.shared.empty_others()
            for layer in self.shared.layers:
                layer.reset()

    def _check_room(self, key: Tensor, pads: list[int]) -> None:
        """Raise an error for a prompt that is too long, before the first layer stores it."""
        shared, cache = self.shared, self.shared.kv
        sequences, new = cache.sequences, max(key.shape[2], cache.sequences.prefill_remaining)
        lengths = sequences.filling or {seq: shared.length + new - pad for seq, pad in enumerate(pads)}
        longest = max(sequences.filling.values(), default=shared.length + new)
        if shared.positions is not None and longest > shared.positions:
            raise ConfigError(
                f"the prompt has {longest} tokens; the model's positions end at {shared.positions}; where the model can go "
                "further, raise max_position_embeddings of its config, with rope_parameters that reach so far (YaRN, say)"
            )
        if cache.offloaded:
            block_size, layer = cache.settings.block_size, cache.offloaded[0]
            wanted = (max(0, length - layer.store.reserved(seq)) for seq, length in lengths.items())
            row = row_format(cache.settings.kv_dtype, key.shape[3], key.dtype)
            block = key.shape[1] * row.row_bytes * block_size
            check_memory(cache.offloaded, cache.streams, sum(-(-tokens // block_size) for tokens in wanted), block, key.device)

    def get_seq_length(self) -> int:
        return self.shared.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shared.length + query_length, 0

    @torch.inference_mode(False)
    def reset(self) -> None:
        if self.first:
            self.shared.kv.reset()
            self.shared.forget()

    @torch.inference_mode(False)  # tensors made here outlive the caller's mode
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens. A positive number means what it means in the installed transformers."""
        if not self.first:
            return
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding of transformers 5.17 gives a tensor
        if tokens_to_remove > 0:
            tokens_to_remove = _kept(self.shared.length, tokens_to_remove) - self.shared.length
        self.shared.check_crop(-tokens_to_remove)
        self.shared.kv.crop(-tokens_to_remove)

    @torch.inference_mode(False)
    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.first:
            self.shared.reordered = True
            self.shared.kv.reorder(beam_idx.tolist())

    @torch.inference_mode(False)
    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.first:
            self.shared.kv.reorder([seq for seq in range(self.shared.kv.sequences.count) for _ in range(repeats)])

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        if self.first:
            self.shared.kv.reorder(torch.arange(self.shared.kv.sequences.count)[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        with torch.inference_mode(False):
            twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def offload(self) -> None:
        raise CacheError("kvthaw offloads by itself; use it without cache_implementation='offloaded'")

    prefetch = offload


class WindowCacheLayer(CacheLayer):
    """A layer that attends only to recent tokens, in a running batch. It knows which, so the model makes no mask."""

    is_sliding = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 1, 0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compilation() -> None:
    """Raise CacheError when a compiled forward runs, where torch's compiler would hide the cache from it."""
    raise CacheError(
        "the model or a module of it was compiled by torch.compile, which hides kvthaw's cache from it; leave it uncompiled: "
        "kvthaw captures decode steps itself"
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' AttentionInterface requires. Returns ([B, T, Hq, D], None).

    query: [B, Hq, T, D].
    key, value: [B, H, n, D].
    """
    if kwargs.get("kvthaw_asked"):
        raise QueryAskedError(query)
    params = AttentionParams(
        query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"), kwargs.get("s_aux")
    )
    layer: TaggingLayer | None = getattr(key, TAG, None)
    if layer is not getattr(value, TAG, None):
        raise UnsupportedModelError(f"{type(module).__name__} changes keys or values after caching them")
    if layer is not None:
        params = replace(params, flash4=layer.flash4)
        return layer.attend(module, query, key, value, attention_mask, params).transpose(1, 2).contiguous(), None
    return dense_attention(module, query, key, value, attention_mask, params, dropout, kwargs.get("is_causal")), None
