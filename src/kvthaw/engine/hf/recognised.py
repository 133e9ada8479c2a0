"""Recognise what a transformers module computes by its code, which is compared with the code of models that others copy."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, SiLU
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

from kvthaw.kernels.gated import Activation
from kvthaw.kernels.rms_norm import Norm
from kvthaw.kernels.rotate import rotate, serves
from kvthaw.kernels.weights import Float8Weight, Int4Weight, Weight

_ACTIVATIONS: dict[type, Activation] = {
    SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROTATES = "apply_rotary_pos_emb"
_NAMES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "query_layernorm", "key_layernorm", "use_rope"),
        *(
            "shape",
            "view",
            "transpose",
            "reshape",
            "contiguous",
            "head_dim",
            "layer_idx",
            "scaling",
            "sliding_window",
            "getattr",
        ),
        *("apply_rotary_pos_emb", "update", "config", "_attn_implementation", "training", "attention_dropout"),
        *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward"),
    }
)
"""What an attention module may use so that it returns what its o_proj returns: nothing follows that projection."""
_BETWEEN = frozenset({"q_norm", "k_norm", "query_layernorm", "key_layernorm", "use_rope"})
"""What a module uses that computes with queries and keys before it turns them, or that turns them in part of its layers."""


def norm_of(module: Any) -> Norm | None:
    """Return what a norm computes; None for another module, or a norm whose weight is no plain parameter."""
    kind: Any = type(module)
    make = _norm_kind(kind)
    return None if make is None or type(module.weight) is not Parameter else make(module)


@lru_cache(64)
def _norm_kind(kind: type[Module]) -> Callable[[Any], Norm] | None:
    """Return how the norms of a class become a Norm."""
    if _same(kind.forward, llama.LlamaRMSNorm.forward):
        return lambda module: Norm(module.weight, module.variance_epsilon)
    if _same(kind.forward, gpt_oss.GptOssRMSNorm.forward):
        return lambda module: Norm(module.weight, module.variance_epsilon, late=True)
    if _same(kind.forward, gemma.GemmaRMSNorm.forward) and _same(getattr(kind, "_norm", None), gemma.GemmaRMSNorm._norm):
        return lambda module: Norm(module.weight, module.eps, offset=1.0, late=True)
    return None


def gate_of(module: Module) -> Activation | None:
    """Return the activation of a feed-forward layer with a gate, an up and a down projection; None for another module."""
    kind: Any = type(module)
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None))) if _is_mlp(kind) else None


@lru_cache(64)
def _is_mlp(kind: type[Module]) -> bool:
    return _same(kind.forward, llama.LlamaMLP.forward)


def is_layer(layer: Any) -> bool:
    """Return whether a decoder layer computes what Llama's does: norm, attention, sum, norm, feed-forward, sum. Its attention
    returns the result of `o_proj` as it is."""
    if not _same(type(layer).forward, llama.LlamaDecoderLayer.forward):
        return False
    code = getattr(inspect.unwrap(type(layer.self_attn).forward), "__code__", None)
    projects = code is not None and "o_proj" in code.co_names and set(code.co_names) <= _NAMES
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return projects and gate_of(layer.mlp) is not None and all(norm_of(norm) is not None for norm in norms)


def rotating(module: Module) -> Callable[..., Any] | None:
    """Return the forward of an attention module with the kernel's rotary positions; None if it has others or none."""
    kind: Any = type(module)
    return _rotating(kind)


@lru_cache(64)
def _rotating(kind: type[Module]) -> Callable[..., Any] | None:
    forward: Any = _renamed(kind.forward)
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    turn: Any = known.get(_ROTATES)
    if code is None or _ROTATES not in code.co_names or not _same(turn, llama.apply_rotary_pos_emb):
        return None
    if not _same(turn.__globals__.get("rotate_half"), llama.rotate_half):
        return None
    found = types.FunctionType(
        code, {**known, _ROTATES: _turned(turn)}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def turns_last(attention: Any) -> bool:
    """Return whether an attention module within `fused` turns what its q_proj and k_proj return, and computes nothing between."""
    code, forward = getattr(inspect.unwrap(type(attention).forward), "__code__", None), vars(attention).get("forward")
    between = code is None or not _BETWEEN.isdisjoint(code.co_names)
    return not between and getattr(forward, "__func__", None) is rotating(attention) is not None


def _turned(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that rotates queries and keys with the kernel, or with `plain` where the kernel does not apply."""

    def turn(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if cos is None or sin is None:
            return q, k  # their projections turned them
        if unsqueeze_dim == 1 and inference(q) and q.ndim == 4 and serves(q, k, cos, sin):
            return rotate(q, k, cos, sin)
        turned: tuple[Tensor, Tensor] = plain(q, k, cos, sin, unsqueeze_dim)
        return turned

    return turn


def weight_of(weight: Any) -> Weight | None:
    """Return a weight as kernels read it; None for a tensor of another class, or one that torchao lays out otherwise.

    A quantised weight is recognised by its class's name and what kernels read of it, for torchao need not be installed.
    """
    if type(weight) is Parameter:
        return weight
    name = f"{type(weight).__module__}.{type(weight).__qualname__}"
    if name == "torchao.quantization.Float8Tensor":
        return _float8(weight)
    if name == "torchao.quantization.Int4TilePackedTo4dTensor":
        return _int4(weight)
    return None


def _float8(weight: Any) -> Float8Weight | None:
    """Return a weight whose codes have a scale for each row or one for all, and whose activations are not quantised."""
    codes, scale, activations = (getattr(weight, name, weight) for name in ("qdata", "scale", "act_quant_kwargs"))
    if activations is not None or type(codes) is not Tensor or type(scale) is not Tensor or codes.shape != weight.shape:
        return None
    if codes.ndim != 2 or codes.shape[1] % 16 or scale.shape not in ((codes.shape[0], 1), (1, 1)):
        return None
    if codes.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        return None
    return Float8Weight(codes, scale.view(-1)) if codes.is_contiguous() and scale.is_contiguous() else None


def _int4(weight: Any) -> Int4Weight | None:
    """Return a weight in tiles of 8 rows, whose activations are not scaled. AMD's GPUs have other tiles."""
    codes, scales, activations, block = (
        getattr(weight, name, weight) for name in ("qdata", "scale_and_zero", "act_pre_scale", "block_size")
    )
    if activations is not None or type(codes) is not Tensor or type(scales) is not Tensor or torch.version.hip is not None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or block[0] != 1 or weight.ndim != 2:
        return None
    if not codes.is_contiguous() or not scales.is_contiguous():
        return None
    try:
        return Int4Weight(codes, scales, block[1], weight.shape)
    except ValueError:  # laid out otherwise
        return None


def inference(x: Tensor) -> bool:
    """Return whether a tensor is a plain one, of a dtype that the kernels support, without a gradient."""
    return type(x) is Tensor and x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)


def _renamed(forward: Any) -> Any:
    """Return a forward without the wrapper that transformers 5.24 has around it for arguments' old names."""
    code = getattr(forward, "__code__", None)
    return forward.__wrapped__ if code is not None and code.co_qualname.startswith("deprecate_kwarg.") else forward


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions have the same code, without what is wrapped around them."""
    return one is other or None is not _computes(one) == _computes(other)


def _computes(function: Any) -> tuple[Any, ...] | None:
    """Return the code of a Python function without names of variables and its docstring."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(const for const in code.co_consts if const != function.__doc__)
