"""kvthaw's attention and mask functions, as transformers calls them, and the models they can serve.

The attention function receives q, k, v after RoPE, but neither the cache nor the layer; a layer of kvthaw's cache (`layer.py`) tags
the keys and values that it returns with itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.engine import ops
from kvthaw.engine.hf.layer import NAME, TAG, CacheLayer
from kvthaw.engine.hf.masks import attention_by_mask, causal_mask, is_padding
from kvthaw.errors import UnsupportedModelError

_BEFORE = "_kvthaw_before"
"""The attribute of a model that keeps the attention which it had before kvthaw's; a copy of the model has it too."""
_SERVED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that attend through kvthaw."""


def unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper: a PEFT model, DistributedDataParallel, a compiled module, or any other that
    delegates to it. Raises UnsupportedModelError if there is none."""
    inner = model
    while not hasattr(inner, "set_attn_implementation") and isinstance(inner, torch.nn.Module) and hasattr(inner, "module"):
        inner = inner.module
    # a delegated method is its owner's
    found: PreTrainedModel | None = getattr(getattr(inner, "set_attn_implementation", None), "__self__", None)
    if found is None:
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UnsupportedModelError(f"model is {kind}; it must be a model of transformers that is loaded")
    return found


def use_kvthaw_attention(model: PreTrainedModel) -> None:
    """Set the model's attention function to kvthaw's. Raises UnsupportedModelError, with the reason, where that cannot work."""
    model = unwrap(model)
    name, config = type(model).__name__, model.config
    text = config.get_text_config(decoder=True)
    if text._attn_implementation == NAME:
        if not hasattr(model, _BEFORE):  # its config is shared with a model that is served
            sharing = [getattr(other, _BEFORE) for other in _SERVED if _shares_config(model, other)]
            setattr(model, _BEFORE, sharing[0] if sharing else {"": model.get_correct_attn_implementation(None)})
        _SERVED.add(model)
        return
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; kvthaw serves decoders")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(f"{name} uses multi-head latent attention, whose cached keys are not the keys attended to")
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if causal and not any(causal):
        raise UnsupportedModelError(f"{name} is an encoder, whose tokens attend both ways; kvthaw serves decoders")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not use transformers' AttentionInterface, through which kvthaw attends")
    ops.register()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    before = {"": config._attn_implementation} | {
        key: part._attn_implementation for key, part in parts.items() if part is not None
    }
    model.set_attn_implementation(NAME)
    if text._attn_implementation != NAME:
        model.set_attn_implementation(before)
        raise UnsupportedModelError(f"{name} did not take kvthaw's attention function")
    setattr(model, _BEFORE, before)
    _SERVED.add(model)


def attends(model: PreTrainedModel) -> bool:
    """Whether a model attends through kvthaw."""
    return model in _SERVED


def give_back_attention(model: PreTrainedModel) -> None:
    """Set the model's attention function to what it was before kvthaw's, unless another model with the same config is served."""
    before = vars(model).pop(_BEFORE, None)
    _SERVED.discard(model)
    if before is not None and not any(_shares_config(model, other) for other in _SERVED):
        model.set_attn_implementation(before)


def _shares_config(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    return model.config.get_text_config(decoder=True) is other.config.get_text_config(decoder=True)


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
    params = AttentionParams(
        query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"), kwargs.get("s_aux")
    )
    if torch.compiler.is_compiling():
        attended = torch.ops.kvthaw.attend(query, key, value, module.layer_idx, params.scale, params.softcap, params.sinks)
        return attended.transpose(1, 2).contiguous(), None
    layer: CacheLayer | None = getattr(key, TAG, None)
    if layer is not getattr(value, TAG, None):
        raise UnsupportedModelError(f"{type(module).__name__} changes keys or values after caching them")
    if layer is not None:
        return layer.attend(module, query, key, value, attention_mask, params).transpose(1, 2).contiguous(), None
    if attention_mask is not None and is_padding(attention_mask):
        attention_mask = causal_mask(attention_mask[..., -key.shape[2] :], query.shape[2])
    causal = kwargs.get("is_causal")
    if (
        attention_mask is None
        and 1 < query.shape[2] < key.shape[2]
        and (getattr(module, "is_causal", True) if causal is None else causal)
    ):
        attention_mask = causal_mask(query.new_ones((1, 1, 1, key.shape[2]), dtype=torch.bool), query.shape[2])
    if params.softcap is None and params.sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=params.scale, is_causal=causal
        )
        return out, None
    if attention_mask is None:
        attention_mask = causal_mask(query.new_ones((1, 1, 1, key.shape[2]), dtype=torch.bool), query.shape[2])
    return attention_by_mask(query, key, value, attention_mask, params).transpose(1, 2).contiguous(), None
