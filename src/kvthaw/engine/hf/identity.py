"""The identity of a model's keys and values: its weights, active adapters and config, and how it computes."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvthaw.engine.hf.hooks import turns_by_length
from kvthaw.engine.hf.model import plain_weights

WEIGHTS = "weights of "
"""The beginning of the names by which `identity` gives digests of weights: of a layer, or of one weight outside all layers."""
_SAMPLED, _TOKENS = 64, 1024  # values of each weight that are compared, and tokens whose embeddings are
_WRAPPED = ("base_layer", "original_module")  # PEFT's names for the module that an adapter replaces
_TELLS = "active_adapters", "active_adapter", "_active_adapter"  # where a module with adapters says which are active
_ADAPTS = {*_TELLS, "disable_adapters", "_disable_adapters", "lora_A", "lora_embedding_A"}
_NO_EFFECT = {
    "architectures", "chunk_size_feed_forward", "dtype", "final_logit_softcapping", "finetuning_task", "id2label", "is_decoder",
    "label2id", "logits_scaling", "num_labels", "pretraining_tp", "problem_type", "return_dict", "task_specific_params",
    "tie_word_embeddings", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache",
    "use_return_dict", "vocab_size",
}  # fmt: skip
"""Config settings that change no key and no value. Tied weights are compared as weights."""
_NO_EFFECT_PARTS = ("_token_id", "_token_ids", "dropout", "pdrop", "initializer_", "output_", "aux_loss", "jitter", "z_loss")


def identity(model: PreTrainedModel) -> dict[str, str]:
    """Return what must be equal for two models to have interchangeable keys and values, by name.

    These are its class, dtype, relevant config settings, active adapters and rotary angles, and some values of each weight. Of
    embeddings only the ones of a text's tokens matter; see `embedded`. The output embeddings change no key and no value.
    """
    weights = dict[str, Any]()
    ends = [name for name, module in model.named_modules() if module in _ends(model)]
    for name, weight in kv_weights(model):
        if not name.startswith(tuple(f"{_plain(end)}." for end in ends)):
            flat = weight.flatten()
            some = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().numpy().tobytes()
            weights.setdefault(_part(name), hashlib.sha256()).update(f"{name} {tuple(weight.shape)}".encode() + some)
    active = adapters(model)
    return {
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "autocast": _autocast(model.device),
        **{f"config.{name}": value for name, value in settings(model).items()},
        "adapters": _named(active),
        "angles": _digest(_rounded(_angles(model))),
        **{f"{WEIGHTS}{part}": known.hexdigest()[:16] for part, known in weights.items()},
    }


def embedded(model: PreTrainedModel, token_ids: list[list[int]]) -> str:
    """Return a digest of some values of the embeddings of up to 1,024 of a text's tokens. The model must have all of them."""
    unique = sorted({token for row in token_ids for token in row})
    some = torch.tensor(unique[:: -(-len(unique) // _TOKENS)], device=model.device)
    with torch.no_grad():
        rows = model.get_input_embeddings()(some)
    return hashlib.sha256(rows[:, :: max(1, rows.shape[1] // _SAMPLED)].float().cpu().numpy().tobytes()).hexdigest()[:16]


def settings(model: PreTrainedModel) -> dict[str, str]:
    """Return the settings of a model's config that its keys and values may depend on, as JSON."""
    config = model.config.get_text_config(decoder=True).to_dict()
    ropes = config.get("rope_parameters") or {}
    kinds = {each.get("rope_type", "default") for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    if kinds == {"default"}:
        config.pop("max_position_embeddings", None)  # it limits positions, but rotates none
    return {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in sorted(config.items())
        if name not in _NO_EFFECT and not name.startswith("_") and not any(part in name for part in _NO_EFFECT_PARTS)
    }


def adapters(model: PreTrainedModel) -> dict[str, list[list[Any]]]:
    """Return the adapters that change each module's output, by module name: their names and scales, and PEFT's data on this
    call's rows.

    Modules whose adapters are disabled are left out.
    """
    found = {}
    for name, module in _adapted(model):
        if active := _active(module):
            scales, hooks = getattr(module, "scaling", None), module._forward_pre_hooks.values()
            each = [[one, scales.get(one) if isinstance(scales, dict) else scales] for one in active]
            rows = [[str(hook.keywords), None] for hook in hooks if isinstance(hook, functools.partial)]
            found[_plain(name)] = each + rows
    return found


def kv_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that keys and values are computed with: all but inactive adapters.

    Names are the ones of the model without adapters.
    """
    idle = {name: _held(module) - {*_active(module)} for name, module in _adapted(model)}
    for name, weight in plain_weights(model):
        if not any(name.startswith(f"{place}.") and _of(name[len(place) + 1 :], idle[place]) for place in idle):
            yield _plain(name), weight


class Origin:
    """The model that KV belongs to. Two are equal for the same model and dtype.

    A call returns how the model computes now: by which adapters, rotary angles and autocast, which may change between
    calls.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._dtype = weakref.ref(model), model.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin) and (self._model, self._dtype) == (other._model, other._dtype)

    def __hash__(self) -> int:
        return hash((self._model, self._dtype))

    def __call__(self) -> str:
        model = self._model()
        if model is None:
            return ""
        return _digest([adapters(model), _autocast(model.device), _angles(model), _places(model)])


def _ends(model: PreTrainedModel) -> list[nn.Module | None]:
    """Return the modules between tokens and hidden states."""
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _part(name: str) -> str:
    """Return the layer that a weight belongs to, or its own name."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return name if found is None else found[0]


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of modules with adapters, and the modules, which replace others, as in PEFT.

    A running batch asks whenever a prompt has come. torch's named_modules takes three times as long.
    """
    seen, left = {model}, [("", model)]
    while left:
        name, module = left.pop()
        own = vars(module)
        if not (_ADAPTS.isdisjoint(own) and _ADAPTS.isdisjoint(own["_modules"])):
            yield name, module
        for part, child in own["_modules"].items():
            if child is not None and child not in seen:
                seen.add(child)
                left.append((f"{name}.{part}" if name else part, child))


def _held(module: nn.Module) -> set[str]:
    """Return the names of all adapters that a module has weights of."""
    return {
        str(key) for name, child in module.named_children() if name not in _WRAPPED for key in getattr(child, "keys", list)()
    }


def _active(module: nn.Module) -> list[str]:
    """Return the names of a module's adapters that change its output."""
    if getattr(module, "disable_adapters", getattr(module, "_disable_adapters", False)) is True:
        return []
    held = _held(module)
    named = next((told for name in _TELLS if isinstance(told := getattr(module, name, None), str | list | tuple)), sorted(held))
    names = [named] if isinstance(named, str) else named
    return [str(name) for name in names if not held or name in held]


def _of(path: str, adapters: set[str]) -> bool:
    """Return whether a weight, by its path within a module with adapters, belongs to these adapters."""
    first, *rest = path.split(".")
    return first not in _WRAPPED and not adapters.isdisjoint(rest)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _named(active: dict[str, list[list[Any]]]) -> str:
    """Describe adapters and their scales in a few words, with a digest of the modules that have them."""
    scaled = [(str(one), scale) for each in active.values() for one, scale in each]
    kinds = sorted({one if scale is None else f"{one} x {scale}" for one, scale in scaled})
    return f"{', '.join(kinds)} ({_digest(active)[:8]})" if active else "none"


def _places(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return the addresses and versions of all weights but the output embeddings', which tell most changes in place."""
    last = model.get_output_embeddings()
    weights = [
        each for module in model.modules() if module is not last for each in module._parameters.values() if each is not None
    ]
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _digest(known: object) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _autocast(device: torch.device) -> str:
    on = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if on else "off"


def _rounded(known: Any) -> Any:
    """Return values without the digits in which devices differ."""
    return (
        [_rounded(one) for one in known] if isinstance(known, list) else f"{known:.4g}" if isinstance(known, float) else known
    )


def _angles(model: PreTrainedModel) -> list[Any]:
    """Return the rotary frequencies in force. If they depend on a prompt's length, the ones of short prompts."""
    changes, found = turns_by_length(model) is not None, list[Any]()
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and name.endswith("inv_freq") and changes == name.endswith("original_inv_freq"):
                scale = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                found.append([name, value.tolist(), None if changes else scale])
    return found
