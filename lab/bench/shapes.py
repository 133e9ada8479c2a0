"""Models by shape, with random weights, and random tokens: true times, no accuracy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvthaw.bench.shapes import SHAPES, config
from kvthaw.engine.hf import PreTrainedModel, model, tensor_parallel
from kvthaw.errors import ConfigError


def build(shape: str, device: torch.device, *, seed: int = 0, layers: int | None = None, tp: int = 1) -> PreTrainedModel:
    """Build a model with seeded random weights, bfloat16 on a GPU and float32 on a CPU.

    layers: build only the first layers.

    tp: build this process's part of a model that `tp` processes build.
    """
    whole = config(shape).num_hidden_layers
    if layers is not None and not 1 <= layers <= whole:
        raise ConfigError(f"layers is {layers}; {shape} has 1 to {whole}")
    made = model.make_config(**SHAPES[shape] | {"num_hidden_layers": layers or whole})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if tp > 1:
        return tensor_parallel.build_part(tp, made, device, dtype, seed=seed)
    torch.manual_seed(seed)
    return model.build(made, device, dtype)


def random_ids(of: PreTrainedModel, rows: int, tokens: int, seed: int) -> Tensor:
    """Return random token ids [rows, tokens] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, of.config.vocab_size, (rows, tokens), generator=generator).to(of.device)


def random_tokens(of: PreTrainedModel, batch: int, seed: int) -> Iterator[Tensor]:
    """Return ids [B, 1] of random tokens, drawn by hundreds so that a step does not wait for them."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(0, of.config.vocab_size, (128, batch, 1), generator=generator)
        yield from drawn.to(of.device)
