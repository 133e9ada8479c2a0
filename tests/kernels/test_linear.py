"""Linear layers of one token against their definition: alone, with a norm, a bias, a gate and a residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import linear, rms_norm
from kvthaw.kernels.linear import Blocks
from kvthaw.kernels.rms_norm import Norm
from shapes import DTYPES, close

pytest.importorskip("triton")

WIDTHS = [(64, 64), (48, 64), (200, 64), (256, 64), (130, 128)]
"""Columns of the weights and of a block: whole blocks, parts of one, several, and several with a part."""


def drawn(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape).to(like.device, like.dtype)


def settings(x: Tensor, rows: list[int], *, norm: bool | str, bias: bool, residual: bool, gate: str | None) -> dict[str, Any]:
    width = x.shape[-1]
    weights = [drawn(n, width, like=x) * width**-0.5 for n in rows]
    return {
        "weights": weights,
        "biases": [drawn(n, like=x) if bias else None for n in rows],
        "norm": Norm(drawn(width, like=x), 1e-5, *((1.0, True) if norm == "gemma" else ())) if norm else None,
        "residual": drawn(1, rows[0], like=x) if residual else None,
        "gate": gate,
    }


def exact(x: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """The definition in float64 where products are concerned; the norm rounds as it does."""
    norm = given["norm"]
    normed = x if norm is None else rms_norm.definition(x, norm)
    wide = {"norm": None, "gate": given["gate"]}
    wide["weights"] = [weight.double() for weight in given["weights"]]
    wide["biases"] = [None if bias is None else bias.double() for bias in given["biases"]]
    wide["residual"] = None if given["residual"] is None else given["residual"].double()
    return [y.to(x.dtype) for y in linear.definition(normed.double(), **wide)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "columns"), WIDTHS)
@pytest.mark.parametrize(
    ("rows", "how"),
    [
        ([10], {}),
        ([10], {"residual": True, "bias": True}),
        ([9, 4, 5], {"norm": True}),
        ([8, 8, 3], {"norm": True, "bias": True}),
        ([7, 6], {}),
        ([5], {"norm": "gemma"}),
        ([13, 13], {"norm": True, "gate": "silu"}),
        ([3, 3], {"gate": "gelu_tanh", "bias": True, "residual": True}),
    ],
    ids=str,
)
def test_products_are_those_of_the_definition(
    rows: list[int], how: dict[str, Any], width: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(1, 1, width, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, rows, **{"norm": False, "bias": False, "residual": False, "gate": None} | how)
    for blocks in (Blocks(4, columns, 1, 4), Blocks(2, columns, 4, 4)):
        found = linear.launch(x, **given, blocks=blocks)
        assert [y.shape for y in found] == [(1, 1, n) for n in (rows[:1] if given["gate"] else rows)]
        for y, expected in zip(found, exact(x, given), strict=True):
            close(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_a_weight_stay_unread(dtype: torch.dtype, device: torch.device) -> None:
    """Weights are parts of larger tensors whose other rows are not numbers."""
    x = drawn(1, 48, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, [5, 3], norm=True, bias=False, residual=False, gate=None)
    around = []
    for weight in given["weights"]:
        whole = torch.full((len(weight) + 8, 48), torch.nan, dtype=dtype, device=device)
        whole[: len(weight)] = weight
        around.append(whole[: len(weight)])
    for y, expected in zip(linear.launch(x, **given | {"weights": around}), linear.launch(x, **given), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("width", [64, 576, 2048, 4096, 5120, 7168, 8192, 14336, 28672])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_have_the_size_that_they_should(width: int, gated: bool) -> None:
    """A block has 4,096 to 8,192 numbers of all its weights, so that a program's registers hold two of them."""
    how = linear.blocks_for(width, gated=gated)
    assert 4096 <= how.rows * how.width * (2 if gated else 1) <= 8192
    assert how.rows & (how.rows - 1) == 0
    assert how.width & (how.width - 1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 2048, 4096, 5120, 8192])
def test_gpu_a_chain_of_layers_waits_for_each_product(hidden: int, device: torch.device) -> None:
    """Each launch reads what the one before it writes, eagerly and in a graph that is replayed with new tokens."""
    inner, x = hidden * 7 // 2, torch.randn(1, hidden, device=device, dtype=torch.bfloat16)
    layers = []
    for _ in range(3):
        qkv = settings(x, [hidden, hidden // 4, hidden // 4], norm=True, bias=False, residual=False, gate=None)
        gates = settings(x, [inner, inner], norm=True, bias=False, residual=False, gate="silu")
        o, down = drawn(hidden, hidden, like=x) * hidden**-0.5, drawn(hidden, inner, like=x) * inner**-0.5
        layers.append((qkv, o, gates, down))

    def run(x: Tensor, product: Any) -> list[Tensor]:
        found = []
        for qkv, o, gates, down in layers:
            query, key, value = product(x, **qkv)
            (x,) = product(query, [o], [None], residual=x)
            (inner,) = product(x, **gates)
            (x,) = product(inner, [down], [None], residual=x)
            found += [key, value]
        return [*found, x]

    run(x, linear.launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, linear.launch)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        eager = run(x, linear.launch)
        graph.replay()
        for mine, same, expected in zip(eager, captured, run(x, linear.definition), strict=True):
            assert torch.equal(mine, same)
            assert float((mine.float() - expected.float()).norm() / expected.float().norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), [(4096, 6144), (14336, 4096), (8192, 1280), (2048, 128256)])
def test_gpu_weights_of_models(width: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(1, width, device=device, dtype=dtype)
    weight = torch.randn(rows, width, device=device, dtype=dtype) * width**-0.5
    (found,) = linear.launch(x, [weight], [None])
    expected = (x.double() @ weight.double().T).to(dtype)
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < {torch.float32: 1e-5}.get(
        dtype, 5e-3
    )
