"""kvthaw's attention as an operator: what torch.compile is told of it is true."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

import kvthaw
from kvthaw import CacheError
from kvthaw.cache.layer_base import LayerKV
from kvthaw.engine.ops import register, serving
from zoo import prompt

DECLARED = ("test_schema", "test_autograd_registration", "test_faketensor")


def tokens(model: PreTrainedModel, rows: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value of one token a row, as a model's projections leave them."""
    register()
    heads = (model.config.num_attention_heads, *[model.config.num_key_value_heads] * 2)
    query, key, value = (torch.randn(rows, 1, n, model.config.head_dim).transpose(1, 2) for n in heads)
    return query, key, value


def weight(layer: LayerKV) -> float:
    """Return the sum of the rows that a layer holds on the device, without signs."""
    return sum(float(tensor.double().abs().sum()) for tensor in layer.tensors() if tensor.dim() == 5)


@pytest.mark.parametrize("method", ["full", "oracle", "pariskv"])
@pytest.mark.parametrize(("rows", "softcap", "sinks"), [(1, None, False), (3, 20.0, True)])
def test_the_operator_is_as_declared(
    llama: PreTrainedModel, method: str, rows: int, softcap: float | None, sinks: bool
) -> None:
    """Its schema, its fake implementation beside the real one, no gradient. That tracing changes no token is tested with compiled
    steps: here it runs many times, and appends to the cache every time."""
    given, cache = tokens(llama, rows), kvthaw.Cache(llama, method, budget=64)
    biases = torch.zeros(llama.config.num_attention_heads) if sinks else None
    with torch.no_grad():
        llama(prompt(rows, 100), past_key_values=cache)
        before = [weight(layer) for layer in cache.kv.layers]
        with serving(cache.kv):
            torch.library.opcheck(torch.ops.kvthaw.attend.default, (*given, 0, 0.125, softcap, biases), test_utils=DECLARED)
    after = [weight(layer) for layer in cache.kv.layers]
    assert after[0] != before[0], "the layer that was named takes the token"
    assert after[1] == before[1]


def test_the_fake_output_lies_as_the_real_one_does(llama: PreTrainedModel) -> None:
    given, cache = tokens(llama, 2), kvthaw.Cache(llama, "oracle", budget=64)
    with torch.no_grad():
        llama(prompt(2, 100), past_key_values=cache)
        with serving(cache.kv):
            real = torch.ops.kvthaw.attend(*given, 0, 0.125, None, None)
    with FakeTensorMode() as mode:
        fake = torch.ops.kvthaw.attend(*map(mode.from_tensor, given), 0, 0.125, None, None)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_outside_of_kvthaws_decoding_it_says_so(llama: PreTrainedModel) -> None:
    given = tokens(llama, 1)
    with pytest.raises(CacheError, match="the model or a module of it was compiled"):
        torch.ops.kvthaw.attend(*given, 0, 0.125, None, None)
