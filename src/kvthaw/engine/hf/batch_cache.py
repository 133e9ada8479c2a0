"""The cache of a running batch. Its layers of every kind keep sequences apart."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvthaw.cache.index_api import Method
from kvthaw.cache.layer_base import SequenceState
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.hooks import turns_by_length
from kvthaw.engine.hf.layer import CacheLayer, Layers
from kvthaw.engine.hf.model import positions
from kvthaw.errors import ConfigError, UnsupportedModelError
from kvthaw.kernels.local import Span


class BatchCache(Cache):
    """A `Cache` of `max_seqs` sequences with room for `capacity` tokens each, which are prefilled one at a time and decoded
    together.

    Sliding-window and chunked layers keep a ring for each sequence. Layers of linear attention keep transformers' own
    states. Raises UnsupportedModelError for a model with other kinds of layers or without a device; else as `Cache`.
    """

    def __init__(self, model: PreTrainedModel, method: str | Method, *, max_seqs: int, capacity: int, **settings: Any) -> None:
        if model.device.type == "meta":
            raise UnsupportedModelError(
                f"{type(model).__name__} has its first weights offloaded by accelerate; a running batch needs them on the device, "
                "an attached model does not"
            )
        super().__init__(model, method, sized_for=(1, capacity, 0), **settings)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayerMixin) and not isinstance(layer, CacheLayer):
                raise UnsupportedModelError(
                    f"layer {i} of {type(self.model).__name__} is a {type(layer).__name__}, which a running batch does not serve"
                )
        self.states = States(self.layers, max_seqs)
        self.kv.open(max_seqs, capacity)

    def swap_out(self, seq: int) -> SequenceState:
        """Move a decoding sequence to host memory, which empties its slot; see KVCache.export."""
        state = replace(self.kv.export(seq), states=self.states.export(seq))
        self.kv.clear(seq)
        return state

    def swap_in(self, seq: int, state: SequenceState) -> None:
        """Load a sequence into an empty slot, and free its host copy; see KVCache.load."""
        try:
            self.kv.load(seq, state)
        finally:
            state.release()
        self.states.load(seq, state.states)

    def _windows(self, config: Any) -> dict[int, Span]:
        kinds = getattr(config, "layer_types", None)
        all_chunked = kinds is None and getattr(config, "sliding_window", None) is None
        return {
            i: Span(layer.sliding_window, chunked=all_chunked if kinds is None else kinds[i] == "chunked_attention")
            for i, layer in enumerate(self.layers)
            if type(layer) is DynamicSlidingWindowLayer
        }


class States:
    """Convolution and recurrent states of linear-attention layers, each in one tensor for all sequences.

    During its prefill a sequence has layers of its own in the cache, so steps of the others do not change them. place()
    copies their state to the sequence's rows. A decode step changes all rows in place, so a failed one cannot be repeated.
    """

    def __init__(self, layers: Layers, max_seqs: int) -> None:
        self._layers, self._max_seqs = layers, max_seqs
        self._whole = {i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}
        self._filling: dict[int, dict[int, Any]] = {}
        self._empty = copy.deepcopy(self._whole)

    def __bool__(self) -> bool:
        """Return whether the model has such layers."""
        return bool(self._whole)

    @contextmanager
    def filling(self, seq: int) -> Iterator[None]:
        """Context in which the model's forward continues the prompt of a sequence."""
        for i, layer in self._filling.setdefault(seq, copy.deepcopy(self._empty)).items():
            self._layers[i] = layer
        try:
            yield
        finally:
            for i, layer in self._whole.items():
                self._layers[i] = layer

    @torch.inference_mode(False)
    def place(self, seq: int) -> None:
        """Copy a sequence's state after its prompt to the rows that decode steps use."""
        for i, layer in self._filling.pop(seq, {}).items():
            own = _tensors(layer)
            if not _tensors(self._whole[i]):
                self._whole[i] = self._layers[i] = copy.deepcopy(layer)
                for (name, key), state in own.items():
                    rows = state.new_zeros(self._max_seqs, *state.shape[1:])
                    if key is None:
                        setattr(self._whole[i], name, rows)
                    else:
                        getattr(self._whole[i], name)[key] = rows
            for at, rows in _tensors(self._whole[i]).items():
                rows[seq].copy_(own[at][0])

    def export(self, seq: int) -> dict[Any, Tensor]:
        """Return the states of a decoding sequence, in host memory."""
        layers = self._whole.items()
        return {(i, at): rows[seq].to("cpu", copy=True) for i, layer in layers for at, rows in _tensors(layer).items()}

    def load(self, seq: int, states: dict[Any, Tensor]) -> None:
        """Load such states into a sequence."""
        for (i, at), state in states.items():
            _tensors(self._whole[i])[at][seq].copy_(state)

    def clear(self, seq: int) -> None:
        """Drop a sequence."""
        self._filling.pop(seq, None)
        for layer in self._whole.values():
            for rows in _tensors(layer).values():
                rows[seq].zero_()


def packs(cache: BatchCache) -> bool:
    """Return whether prompts of several sequences may follow each other in one row of a forward.

    All layers must be kvthaw's, which keep the prompts apart, and the model must take each token's position.
    """
    model, split = cache.model, cache.kv.settings.ranks.size > 1
    takes = "position_ids" in inspect.signature(model.forward).parameters and model._supports_logits_to_keep()
    counts = getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False)  # tokens of the forward
    return takes and not (split or counts or cache.states) and len(cache.kv.layers) == len(cache.layers)


def check_positions(model: PreTrainedModel, capacity: int) -> None:
    """Raise an error for models whose positions end before the capacity, or depend on the rest of the batch."""
    limit = positions(model)
    if limit is not None and capacity > limit:
        raise ConfigError(f"capacity is {capacity}; the model's positions end at {limit}")
    kind = turns_by_length(model)
    if kind is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} turns its keys by the longest row of a batch ({kind} positions); none can join it"
        )


def _tensors(layer: Any) -> dict[tuple[str, Any], Tensor]:
    """Return the states of a layer, by attribute and key."""
    found = {}
    for name, value in vars(layer).items():
        for key, each in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(each, Tensor):
                found[name, key] = each
    return found
