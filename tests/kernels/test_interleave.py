"""The kernel that copies prompts' keys and values to rows, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels.interleave import Prompts, definition, interleave, launch
from shapes import poisoned

pytest.importorskip("triton")

SPANS = [[(1, 0, 150)], [(3, 0, 7), (0, 7, 71), (2, 71, 72), (1, 72, 150)], [(0, 0, 64), (1, 64, 150)]]


def made(kind: str, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Return keys [H, n, D] as models have them."""
    if kind == "projected":
        return torch.randn(tokens, 3 * heads, dim)[:, heads : 2 * heads].transpose(0, 1)
    if kind == "odd":
        return torch.randn(heads, tokens, dim + 1)[:, :, 1:]
    return torch.randn(heads, tokens, dim)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "kinds"),
    [
        (2, 80, torch.bfloat16, ("projected", "whole")),
        (1, 128, torch.float16, ("whole", "projected")),
        (3, 6, torch.float32, ("odd", "whole")),
    ],
)
@pytest.mark.parametrize(
    "broken", [(), ((0, "keys", 3, torch.inf), (1, "values", 149, torch.nan)), ((1, "keys", 71, -torch.inf),)]
)
def test_against_the_definition(
    spans: list[tuple[int, int, int]], heads: int, dim: int, dtype: torch.dtype, kinds: tuple[str, str],
    broken: tuple[tuple[int, str, int, float], ...], device: torch.device,
) -> None:  # fmt: skip
    tickets = torch.zeros(2, 5, 3, dtype=torch.int32, device=device)
    layers = [Prompts(*(made(kind, heads, 150, dim).to(device, dtype) for kind in kinds), own[:, 1]) for own in tickets]
    same = [Prompts(each.keys, each.values, each.flags.clone()) for each in layers]
    layers[1].flags[4] = same[1].flags[4] = 1  # of a sequence without a prompt
    for layer, name, token, value in broken:
        getattr(layers[layer], name)[heads - 1, token, dim - 1] = value
    rows, expected = (poisoned(2, heads, 150, 2, dim, dtype=dtype).to(device) for _ in range(2))
    definition(same, spans, expected)
    launch(layers, spans, rows)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    for each, other in zip(layers, same, strict=True):
        assert torch.equal(each.flags, other.flags)
    hit = {(layer, seq) for layer, _, token, _ in broken for seq, start, stop in spans if start <= token < stop}
    assert {(i, seq) for i, each in enumerate(layers) for seq in range(4) if each.flags[seq]} == hit
    assert torch.equal(rows[1, :, :, 1].nan_to_num(), layers[1].values.nan_to_num())


def test_keys_and_values_of_other_dtypes_are_copied_too(device: torch.device) -> None:
    """As under autocast, where rotary positions leave keys in float32."""
    keys, values = torch.randn(2, 30, 16, device=device), torch.randn(2, 30, 16, device=device).bfloat16()
    flags, rows = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(1, 2, 30, 2, 16, device=device)
    interleave([Prompts(keys, values, flags)], [(0, 0, 30)], rows)
    assert torch.equal(rows[0, :, :, 0], keys)
    assert torch.equal(rows[0, :, :, 1], values.float())
    assert not flags.any()
