"""Which models kvthaw can serve, and how to install and remove kvthaw's attention and mask functions."""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import is_flash_attn_4_available

from kvthaw.engine.hf.hooks import drop_hooks
from kvthaw.engine.hf.layer import BEFORE, FLASH_ATTENTION_4, NAME, attention
from kvthaw.engine.hf.masks import padding_mask
from kvthaw.engine.hf.model import head_dim, kv_heads
from kvthaw.engine.hf.tensor_parallel import check_split, restore_forwards, use_local_forwards
from kvthaw.errors import UnsupportedModelError, first_line
from kvthaw.kernels import flash_attention_4
from kvthaw.kernels.dense import definition

_log = logging.getLogger(__name__)
_SERVED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that attend through kvthaw. They may share a config and modules, so each must find the others."""


def unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper that delegates to it: PEFT, DistributedDataParallel, a compiled module or
    another.

    Raises UnsupportedModelError if there is none.
    """
    inner = model
    while not hasattr(inner, "set_attn_implementation") and isinstance(inner, torch.nn.Module) and hasattr(inner, "module"):
        inner = inner.module
    # a delegated method belongs to the wrapped model
    found: PreTrainedModel | None = getattr(getattr(inner, "set_attn_implementation", None), "__self__", None)
    if found is None:
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UnsupportedModelError(f"model is {kind}; it must be a model of transformers that is loaded")
    return found


def use_kvthaw_attention(model: PreTrainedModel) -> None:
    """Set the model's attention function to kvthaw's. Raises UnsupportedModelError, with the reason, if that cannot work."""
    model = unwrap(model)
    name, config = type(model).__name__, model.config
    text = config.get_text_config(decoder=True)
    if text._attn_implementation == NAME:
        if not hasattr(model, BEFORE):  # it shares its config with a served model
            sharing = [getattr(other, BEFORE) for other in _SERVED if _shares_config(model, other)]
            setattr(model, BEFORE, sharing[0] if sharing else {"": model.get_correct_attn_implementation(None)})
        use_local_forwards(model)
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
    check_split(model, getattr(text, "num_key_value_heads", None))
    _check_devices(model)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    before = _names(config)
    model.set_attn_implementation(NAME)
    if text._attn_implementation != NAME:
        model.set_attn_implementation(before)
        raise UnsupportedModelError(f"{name} did not take kvthaw's attention function")
    use_local_forwards(model)
    setattr(model, BEFORE, before)
    _SERVED.add(model)


def choose_flash_attention_4(model: PreTrainedModel) -> bool:
    """Set the attention of the model's text part to FlashAttention 4, which kvthaw then uses for prompts.

    Does so if it is installed, has kernels for the model on its GPU, and computes the right result there. Returns whether it
    did; if not, the model keeps its attention. Call this before kvthaw serves the model.
    """
    config, text = model.config, model.config.get_text_config(decoder=True)
    served = torch.empty(1, 1, 1, head_dim(text), dtype=model.dtype, device=model.device)
    if not is_flash_attn_4_available() or not flash_attention_4.serves(served):
        return False
    others = getattr(model, "_compatible_flash_implementations", None)
    if others is not None and FLASH_ATTENTION_4 not in others:  # transformers would load one of these instead, from the Hub
        return False
    parts = [""] if text is config else [key for key in config.sub_configs if getattr(config, key, None) is text]
    before = _names(config)
    try:
        _try_flash_attention_4(model, text)
        model.set_attn_implementation(dict.fromkeys(parts, FLASH_ATTENTION_4))
    except Exception as error:  # whatever a broken installation raises, or a model that refuses
        _log.warning("FlashAttention 4 is installed, and prompts attend without it: %s", first_line(error))
        model.set_attn_implementation(before)
    chosen = bool(text._attn_implementation == FLASH_ATTENTION_4)
    if chosen:
        _log.info("prompts attend by FlashAttention 4")
    return chosen


@torch.no_grad()
def _try_flash_attention_4(model: PreTrainedModel, text: Any) -> None:
    """Raise an error if FlashAttention 4 cannot be imported, compiled or launched, or if its result is wrong."""
    heads, softcap = kv_heads(text), getattr(text, "attn_logit_softcapping", None)
    shape = 1, text.num_attention_heads, 128, head_dim(text)
    query = torch.arange(math.prod(shape), dtype=torch.float32, device=model.device).sin().view(shape).to(model.dtype)
    given = query[:, :, 28:], query[:, :heads], query[:, :heads].flip(2)
    out, _ = flash_attention_4.attend(*given, scale=0.5, causal=True, softcap=softcap)
    expected, _ = definition(*given, scale=0.5, causal=True, softcap=softcap)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < 0.03:
        raise ArithmeticError(f"its result differs from the definition by {error:.3g} of the norm")


def _names(config: Any) -> dict[str, str]:
    """Return the names of a model's attention functions, by sub-config; "" is the model itself."""
    parts = {"": config} | {key: getattr(config, key, None) for key in config.sub_configs}
    return {key: part._attn_implementation for key, part in parts.items() if part is not None}


def _check_devices(model: PreTrainedModel) -> None:
    name = type(model).__name__
    weights = (weight for part, weight in model.named_parameters() if "att" in part)
    devices = sorted({str(weight.device) for weight in weights if weight.device.type != "meta"})  # where accelerate offloads it
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{name} has its layers on {', '.join(devices)} (device_map); kvthaw keeps a cache on one device: split the model by "
            "heads over processes, with torchrun and tp_size"
        )


def attends(model: PreTrainedModel) -> bool:
    """Return whether a model attends through kvthaw."""
    return model in _SERVED


def give_back_attention(model: PreTrainedModel) -> None:
    """Restore the attention function from before kvthaw's, unless another model with the same config is served.

    Removes the hooks of modules that no other served model has.
    """
    restore_forwards(model)
    before = vars(model).pop(BEFORE, None)
    _SERVED.discard(model)
    drop_hooks({*model.modules()}.difference(*(other.modules() for other in _SERVED)))
    if before is not None and not any(_shares_config(model, other) for other in _SERVED):
        model.set_attn_implementation(before)


def _shares_config(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    return model.config.get_text_config(decoder=True) is other.config.get_text_config(decoder=True)
