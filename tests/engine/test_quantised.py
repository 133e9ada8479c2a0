"""Models whose linear layers have quantised weights: what kvthaw keeps has the dtype that they compute in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvthaw
from kvthaw.errors import CacheError
from kvthaw.evaluate.machine import fingerprint
from lab.bench.shapes import split
from ranks import run
from zoo import VOCAB, build

PROMPT = torch.randint(1, VOCAB, (1, 100), generator=torch.Generator().manual_seed(3))


class Scaled(Tensor):
    """A weight of 8-bit numbers and a scale, which passes for one of the dtype that it computes in, as torchao's do."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Scaled:
        return Scaled(**parts)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.numbers * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{function} of a quantised weight")


class Packed(nn.Module):
    """A linear layer whose weight is bytes, as bitsandbytes' and compressed-tensors' are."""

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter((numbers + 128).to(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.to(x.dtype) - 128) * self.scale)


def by_torchao(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model, its decoder's weights quantised in place: by what of torchao runs on a CPU."""
    torchao = pytest.importorskip("torchao")
    if kind == "int4":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=32)
    else:
        config = getattr(torchao.quantization, {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind])()
    torchao.quantize_(model.get_decoder(), config)
    return model


def quantised(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model in bfloat16 whose layers' linear weights have 8 or 4 bits."""
    model = build("llama", seed=seed, num_hidden_layers=2).bfloat16()
    if kind in ("int8", "fp8", "int4"):
        return by_torchao(model, kind)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
                    numbers = (linear.weight / scale).round().to(torch.int8)
                    if kind == "subclass":
                        linear.weight = nn.Parameter(Scaled(numbers, scale), requires_grad=False)
                    else:
                        setattr(part, name, Packed(numbers, scale))
    return model


def generate(model: PreTrainedModel) -> Tensor:
    made: Tensor = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    return made


@pytest.mark.parametrize("kind", ["subclass", "packed", "int8", "fp8", "int4"])
def test_a_quantised_model_is_served_in_the_dtype_it_computes_in(kind: str, tmp_path: Path) -> None:
    model = quantised(kind)
    plain = generate(model)
    for method in ("full", "oracle", "icecache-digest", "pariskv"):
        with kvthaw.attach(model, method, budget=None if method == "full" else 1024):
            assert torch.equal(generate(model), plain)
    with kvthaw.attach(model, "infinigen", budget=48) as handle:
        generate(model)
        assert {layer.store.dtype for layer in handle.cache.kv.offloaded} == {torch.bfloat16}
    batch = kvthaw.Batch(model, "oracle", max_seqs=1, capacity=120, budget=1024)
    request = batch.join(PROMPT, max_new_tokens=4, stop=())
    while batch.requests:
        batch.step()
    assert request.tokens == plain[0, 100:].tolist()
    cache, other = kvthaw.Cache(model, "oracle"), quantised(kind, seed=1)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    cache.save(tmp_path / "saved", PROMPT)
    assert kvthaw.Cache.load(tmp_path / "saved", model, "oracle").get_seq_length() == 100
    with pytest.raises(CacheError, match="weights"):
        kvthaw.Cache.load(tmp_path / "saved", other, "oracle")
    assert fingerprint(model) != fingerprint(other)


def part(kind: str, _: int) -> dict[str, list[int]]:
    """The tokens of a model of which each process quantises its own part."""
    model = split(2, partial(build, "llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4))
    for module in model.bfloat16().get_decoder().modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to_local(), requires_grad=False)
    found = {"transformers": generate(by_torchao(model, kind))[0].tolist()}
    for method in ("full", "clusterkv", "pariskv"):
        with kvthaw.attach(model, method, budget=None if method == "full" else 1024):
            found[method] = generate(model)[0].tolist()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers splits a model over the GPUs where there are some")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_each_process_quantises_its_part_of_a_split_model(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    first, second = run(2, partial(part, kind), tmp_path / "meeting")
    assert first == second == dict.fromkeys(first, first["transformers"])
