"""Norms, rotary positions and gates: kernels against their definitions, and these against transformers' modules."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

from kvthaw.engine.hf.recognised import gate_of, norm_of
from kvthaw.kernels import gated, rms_norm, rotate
from shapes import DTYPES, close

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 64), (2, 3, 80), (7, 1), (2, 5000), (0, 64), (3, 4, 2, 96)])
def test_rows_are_normalised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = 3 * torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    kinds: tuple[dict[str, Any], ...] = ({}, {"late": True}, {"offset": 1.0, "late": True})
    for kind in kinds:
        norm = rms_norm.Norm(weight, 1e-5, **kind)
        out = rms_norm.launch(x, norm)
        assert out.dtype == dtype
        close(out, rms_norm.definition(x, norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 64), (7, 1), (2, 5000), (0, 64)])
def test_rows_are_added_and_normalised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (3 * torch.randn(shape).to(device, dtype) for _ in range(2))
    norm = rms_norm.Norm(torch.randn(shape[-1]).to(device, dtype), 1e-5)
    total, normed = rms_norm.add_launch(x, residual, norm)
    assert (total.dtype, normed.dtype) == (dtype, dtype)
    assert device.type == "cpu" or torch.equal(total, residual + x)  # Triton's interpreter rounds bfloat16 otherwise
    close(total, residual + x)
    close(normed, rms_norm.add_definition(x, residual, norm)[1])


def test_a_wide_weight_widens_the_rows(device: torch.device) -> None:
    x, weight = torch.randn(4, 48).to(device, torch.bfloat16), torch.randn(48).to(device)
    norm = rms_norm.Norm(weight, 1e-6)
    out = rms_norm.launch(x, norm)
    assert out.dtype == torch.float32
    close(out.to(torch.bfloat16), rms_norm.definition(x, norm).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 33), (2, 2048), (0, 8)])
def test_gates_multiply(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    gate, up = (4 * torch.randn(shape).to(device, dtype) for _ in range(2))
    for activation in get_args(gated.Activation):
        out = gated.launch(gate, up, activation)
        assert out.dtype == dtype
        close(out, gated.definition(gate, up, activation))


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (3, 1, 2064), (2, 1, 1, 16)])
def test_gates_multiply_halves_of_a_product(shape: tuple[int, ...], device: torch.device) -> None:
    both = torch.randn(*shape[:-1], 2 * shape[-1]).to(device)
    gate, up = both.chunk(2, dim=-1)
    assert gated.serves(gate, up)
    out, before = gated.launch(gate, up, "silu"), up.clone()
    assert out.is_contiguous()
    close(out, gated.definition(gate, up, "silu"))
    close(gated.launch(gate, up, "silu", overwrite=True), out)
    close(gate, out)
    assert torch.equal(up, before)


def test_what_the_gate_does_not_take() -> None:
    both = torch.randn(4, 6, 16)
    assert gated.serves(both, both)
    assert not gated.serves(both[:, ::2], both[:, 1::2].contiguous())
    assert not gated.serves(both[:, :4], both[:, :4])  # rows at two distances
    assert not gated.serves(both.transpose(1, 2), both.transpose(1, 2))


def angles(batch: int, steps: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.randn(batch, steps, dim // 2).repeat(1, 1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", [True, False], ids=["heads inside tokens", "tokens inside heads"])
@pytest.mark.parametrize(("batch", "rows", "steps", "dim"), [(1, 1, 17, 64), (2, 2, 3, 80), (3, 1, 1, 128), (2, 1, 40, 16)])
def test_positions_turn_queries_and_keys(
    batch: int, rows: int, steps: int, dim: int, inside: bool, dtype: torch.dtype, device: torch.device
) -> None:
    query, key = (torch.randn(batch, steps, heads, dim).to(device, dtype).transpose(1, 2) for heads in (4, 2))
    query, key = (query, key) if inside else (query.contiguous(), key.contiguous())
    cos, sin = (x.to(device) for x in angles(rows, steps, dim, dtype))
    assert rotate.serves(query, key, cos, sin)
    found = rotate.launch(query, key, cos, sin)
    for out, x, expected in zip(found, (query, key), rotate.definition(query, key, cos, sin), strict=True):
        assert out.stride() == x.stride()
        close(out, expected)


@pytest.mark.parametrize(("batch", "steps"), [(3, 1), (1, 17), (2, 5)])
def test_positions_turn_parts_of_a_product(batch: int, steps: int, device: torch.device) -> None:
    whole = torch.randn(batch, steps, (4 + 2 + 2) * 16).to(device)
    query, key, _ = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in whole.split([64, 32, 32], dim=-1))
    cos, sin = (x.to(device) for x in angles(1, steps, 16, torch.float32))
    found = rotate.launch(query, key, cos, sin)
    for out, expected in zip(found, rotate.definition(query, key, cos, sin), strict=True):
        assert out.transpose(1, 2).is_contiguous()
        close(out, expected)


def test_what_the_rotation_does_not_take() -> None:
    query, key, (cos, sin) = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), angles(1, 3, 8, torch.float32)
    assert rotate.serves(query, key, cos, sin)
    assert not rotate.serves(query, key.double(), cos, sin)
    assert not rotate.serves(query, key, cos[:, :, :4], sin[:, :, :4])
    assert not rotate.serves(query.transpose(2, 3).contiguous().transpose(2, 3), key, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_definitions_are_those_of_gemma_and_gpt_oss(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 24).to(dtype)
    for norm in (gemma3.Gemma3RMSNorm(24, eps=1e-4).to(dtype), gpt_oss.GptOssRMSNorm(24, eps=1e-4).to(dtype)):
        norm.weight.data.normal_()
        known = norm_of(norm)
        assert known is not None
        assert torch.equal(norm(x), rms_norm.definition(x, known))
    config = gemma3.Gemma3TextConfig(hidden_size=24, intermediate_size=40)
    mlp = gemma3.Gemma3MLP(config).to(dtype)
    activation = gate_of(mlp)
    assert activation == "gelu_tanh"
    assert torch.equal(mlp(x), mlp.down_proj(gated.definition(mlp.gate_proj(x), mlp.up_proj(x), activation)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_definitions_are_those_of_llama(dtype: torch.dtype) -> None:
    config = llama.LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=3)
    x = torch.randn(2, 3, 24).to(dtype)
    norm = llama.LlamaRMSNorm(24, eps=1e-4).to(dtype)
    norm.weight.data.normal_()
    assert torch.equal(norm(x), rms_norm.definition(x, rms_norm.Norm(norm.weight, 1e-4)))
    mlp = llama.LlamaMLP(config).to(dtype)
    assert torch.equal(mlp(x), mlp.down_proj(gated.definition(mlp.gate_proj(x), mlp.up_proj(x), "silu")))
    query, key, turns = torch.randn(2, 4, 3, 8).to(dtype), torch.randn(2, 2, 3, 8).to(dtype), angles(2, 3, 8, dtype)
    for found, expected in zip(
        rotate.definition(query, key, *turns), llama.apply_rotary_pos_emb(query, key, *turns), strict=True
    ):
        assert torch.equal(found, expected)
