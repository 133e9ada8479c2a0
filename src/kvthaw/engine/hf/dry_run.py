"""Memory of a model's cache from the config alone: model and cache are created on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvthaw.cache import dry_run as cache_dry_run
from kvthaw.cache.dry_run import Needs
from kvthaw.cache.kv_cache import KVCache
from kvthaw.engine.hf.model import head_dim, kv_heads, of_layer, plain_weights
from kvthaw.engine.hf.tensor_parallel import ranks


def dry_run(
    model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], batch: int, prompt: int, new_tokens: int, *, pinned: bool
) -> Needs:
    """Return the memory of an empty `Cache` for `batch` prompts of `prompt` tokens and answers of at most `new_tokens`.

    kv, layers: the cache's.
    pinned: whether rows on the host are pinned.
    """
    config, made = model.config.get_text_config(decoder=True), dict[int, tuple[Tensor, Tensor]]()

    def tensors(layer: int) -> tuple[Tensor, Tensor]:
        own = of_layer(config, layer)
        if id(own) not in made:
            made[id(own)] = _tensors(model, own, batch, prompt)
        return made[id(own)]

    needs = cache_dry_run.dry_run(kv, tensors, batch, prompt, new_tokens, pinned=pinned)
    windows = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    for layer in windows:
        key = tensors(layers.index(layer))[1]
        layer.update(key, key)
    return replace(needs, windows=sum(layer.keys.nbytes + layer.values.nbytes for layer in windows))


def _tensors(model: PreTrainedModel, config: Any, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the query and key of a layer of a config, of this process's heads, on the meta device."""
    processes = ranks(model)
    query, key = (
        torch.empty(batch, n // processes.all_heads(1), tokens, head_dim(config), dtype=model.dtype, device="meta")
        for n in (config.num_attention_heads, kv_heads(config))
    )
    return query, key


def weight_bytes(model: PreTrainedModel, tokens: int = 0) -> int:
    """Return the bytes of a model's weights.

    tokens: only count what a step of this number of tokens reads, which uses few of the experts; 0: all weights.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), 0)
    used = min(1.0, tokens * (getattr(config, "num_experts_per_tok", None) or 1) / experts) if experts and tokens else 1.0
    return sum(round(weight.nbytes * (used if ".experts." in name else 1.0)) for name, weight in plain_weights(model))
