"""Models by shape, with random weights: true times, no accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvthaw.errors import unknown

if TYPE_CHECKING:
    from kvthaw.engine.hf import PreTrainedConfig


def sizes(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int, vocab: int) -> dict[str, Any]:
    """Return the arguments of `make_config` for a kind of model and its sizes."""
    widths = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    rest = {"max_position_embeddings": 1 << 21, "tie_word_embeddings": hidden < 4096}
    return {"kind": kind, **widths, **rest, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim}


SHAPES = {
    "llama-3.1-8b": sizes("llama", 4096, 14336, 32, 32, 8, 128, 128_256) | {"rope_theta": 500_000.0},
    "llama-3.1-70b": sizes("llama", 8192, 28672, 80, 64, 8, 128, 128_256) | {"rope_theta": 500_000.0},
    "llama-3.2-1b": sizes("llama", 2048, 8192, 16, 32, 8, 64, 128_256) | {"rope_theta": 500_000.0},
    "qwen3-8b": sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151_936),
    "qwen3-4b": sizes("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936),
    "tiny": sizes("llama", 256, 512, 4, 8, 2, 64, 1024) | {"rope_theta": 500_000.0},
}
"""Name -> the kind of model and fields of its config."""

TRAINED = {
    "llama-3.1-8b": 131072, "llama-3.1-70b": 131072, "llama-3.2-1b": 131072, "qwen3-8b": 40960, "qwen3-4b": 40960,
}  # fmt: skip
"""Shape -> the positions that the published model was trained for. A shape itself has more, for measurements of time."""


def config(shape: str) -> PreTrainedConfig:
    """Return the model's configuration."""
    from kvthaw.engine.hf.model import make_config

    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    return make_config(**SHAPES[shape])
