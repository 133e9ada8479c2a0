"""Tiny models of every architecture that kvthaw names, with random weights sharp enough that a wrong key changes the tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvthaw.methods import METHODS

VOCAB = 199
FULL, SLIDING = "full_attention", "sliding_attention"
ROLLS_BACK_SLIDING = Version(transformers.__version__) >= Version("5.23")
"""Whether transformers resets and crops its own sliding-window layers rightly; before 5.23 it does not."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 24}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PLAIN: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": VOCAB}
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "sliding_window": 24,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "topk_group": 1,
    "n_group": 1,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "glm4": ("Glm4", {}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", _MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9}),
    "gemma3": ("Gemma3", _MIXED | {"query_pre_attn_scalar": 16}),
    "gemma3n": ("Gemma3n", _SHARED | {"laurel_rank": 8}),
    "gemma4": ("Gemma4", _SHARED | {"global_head_dim": 32}),
    "gpt_oss": ("GptOss", _MIXED | _EXPERTS),
    "olmo3": ("Olmo3", _MIXED),
    "cohere2": ("Cohere2", _MIXED),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": ("Granite", {"attention_multiplier": 0.4}),
    "ministral3": ("Ministral3", {"sliding_window": None}),
    "seed_oss": ("SeedOss", {}),
    "exaone4": ("Exaone4", _MIXED),
    "minimax_m2": ("MiniMaxM2", _EXPERTS),
    "mixtral": ("Mixtral", _EXPERTS),
    "llama4": ("Llama4", {"attention_chunk_size": 32, "no_rope_layers": [1, 0, 1, 0], "num_hidden_layers": 4,
                          "num_local_experts": 2, "intermediate_size_mlp": 64}),
    "qwen3_next": ("Qwen3Next", _EXPERTS | {"num_hidden_layers": 4, "layer_types": ["linear_attention", FULL] * 2,
                   "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoX", {}),
    "stablelm": ("StableLm", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}  # fmt: skip
"""Architectures that work, as (prefix of its classes, settings that differ from the common ones)."""

KINDS = (
    *("full", "streaming", "h2o", "snapkv-refreshed", "oracle", "quest", "icecache-digest", "icecache-reuse"),
    *("pariskv", "clusterkv", "prkv", "omnikv"),
)
"""A method of each kind that a cache treats otherwise: for tests of what a cache does, whatever the index. What an index does is
tested over METHODS."""

DISTINCT = tuple(name for name in METHODS if not name.endswith("-plus") and name not in ("icecache", "icecache-reuse"))
"""All methods but those that are another one's index at other options: for tests of what an index does in a whole model."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", _LATENT),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {"head_dim": ...}),
    "gptj": ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}),
    "mamba": ("Mamba", {"state_size": 4}),
}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a model's config."""
    return _COMMON | (MODELS | REFUSED)[name][1]


def build(name: str, *, seed: int = 0, attention: str | None = None, **settings: Any) -> PreTrainedModel:
    """A model by name, in float32 on the CPU, with settings of its config changed, or left out where they are `...`. It is
    made once; the caller gets a copy, which takes half as long."""
    key = repr((name, seed, attention, sorted(settings.items())))
    if key not in _BUILT:
        _BUILT[key] = _build(name, seed, attention, settings)
    return copy.deepcopy(_BUILT[key])


_BUILT: dict[str, PreTrainedModel] = {}


def _build(name: str, seed: int, attention: str | None, settings: dict[str, Any]) -> PreTrainedModel:
    prefix, _ = (MODELS | REFUSED)[name]
    stem = prefix + "Text" if prefix in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else prefix
    chosen = settings_of(name) | settings
    config = getattr(transformers, stem + "Config")(**{key: value for key, value in chosen.items() if value is not ...})
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, prefix + ("LMHeadModel" if name == "gpt2" else "ForCausalLM"))(config)
    model.generation_config.pad_token_id = 0
    return sharpen(model, seed).eval().requires_grad_(False)


def build_exact(name: str, **settings: Any) -> PreTrainedModel:
    """As build(), in float64: for tests that compare computations of different shapes below the full budget. In float32 a product
    of five rows rounds otherwise than five products of one, differently on each CPU, and the last bit may decide what is selected.
    """
    model = build(name, **settings).double()
    model.config._experts_implementation = "eager"  # the others take no float64
    return model


def build_for(method: str) -> PreTrainedModel:
    """Return the Llama of build_exact() with two layers, or three for a method that serves its first two otherwise."""
    return build_exact("llama", num_hidden_layers=3 if method in ("omnikv", "infinigen", "icecache-reuse") else 2)


def multiply_in_float64(model: PreTrainedModel) -> None:
    """Have the linear layers of a model of fewer digits compute in float64, so that their rounding does not depend on how many rows
    are multiplied at once."""

    def product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return functional.linear(x.double(), weight, bias).to(x.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            bias = None if module.bias is None else module.bias.double()
            module.forward = functools.partial(product, module.weight.double(), bias)  # type: ignore[method-assign]


def sharpen(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Random weights with which attention looks far and the next token depends on what it saw."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=rng)
            if "sinks" in name:
                weight.copy_(7 + noise)
            elif "norm" in name or weight.ndim < 2:
                weight += 0.1 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(noise)
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn", "query")):
                weight.copy_(1.5 * noise * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    return model


def prompt(rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Random token ids [rows, length] without the padding's."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def ragged(lengths: list[int], *, seed: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask of rows of so many tokens, padded on the left."""
    ids = prompt(len(lengths), max(lengths), seed=seed)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}
