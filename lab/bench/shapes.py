"""Models by shape, with random weights, and random tokens: true times, no accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from kvthaw.bench.shapes import SHAPES, config
from kvthaw.engine.hf import PreTrainedModel, model
from kvthaw.engine.hf.tensor_parallel import ranks
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
        return build_part(tp, made, device, dtype, seed=seed)
    torch.manual_seed(seed)
    return model.build(made, device, dtype)


def split(size: int, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return this process's part of a model that all of `size` processes make, as from_pretrained(distributed_config=) would
    load it.

    Tied embeddings become two tensors.
    """
    config, _, mesh = PreTrainedModel.prepare_distribute_model(DistributedConfig(tp_size=size))
    model = make()
    words, scores = model.get_input_embeddings(), model.get_output_embeddings()
    if words.weight is scores.weight:
        scores.weight = torch.nn.Parameter(words.weight.detach().clone())
    return model.maybe_distribute_model(model, config, mesh)


@torch.no_grad()
def build_part(
    size: int, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> PreTrainedModel:
    """Build this process's part of a causal language model of random weights. No process ever holds the whole model."""

    def on_meta() -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model

    model = split(size, on_meta).to_empty(device=device)
    same, own = (torch.Generator(device).manual_seed(seed + n) for n in (0, 1 + ranks(model).rank))
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            is_split = isinstance(weight, DTensor) and any(isinstance(one, Shard) for one in weight.placements)
            if part.dim() == 1:
                part.fill_(name == "weight")  # a norm's; biases are 0
            else:
                part.normal_(std=config.initializer_range, generator=own if is_split else same)
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)  # rotary frequencies
    return model.eval()


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
