"""Models by shape, with random weights: true times, no accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvthaw.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int, vocab: int) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim,
        vocab_size=vocab,
        max_position_embeddings=1 << 21,
        rope_theta=500_000.0,
        tie_word_embeddings=hidden < 4096,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=1 << 21,
        tie_word_embeddings=hidden < 4096,
    )


SHAPES = {
    "llama-3.1-8b": lambda: _llama(4096, 14336, 32, 32, 8, 128, 128_256),
    "llama-3.2-1b": lambda: _llama(2048, 8192, 16, 32, 8, 64, 128_256),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32),
    "qwen3-4b": lambda: _qwen3(2560, 9728, 36, 32),
    "tiny": lambda: _llama(256, 512, 4, 8, 2, 64, 1024),
}
"""Name -> the model's config."""


def build(shape: str, device: torch.device, *, seed: int = 0, layers: int | None = None) -> PreTrainedModel:
    """A model of a shape with seeded random weights, bfloat16 on a GPU and float32 on a CPU; of `layers` layers, if given."""
    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = SHAPES[shape]()
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"layers is {layers}; {shape} has 1 to {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
