"""The attention that sink and ring have: kernel and definition, and the definition and a sum over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, held_mass
from kvthaw.regions import Regions
from shapes import Shape, close, over_shapes

triton_only = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


REGIONS = Regions(3, 20, 6)


def slab(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A query, keys of sink, ring and a pool, of which places without a token are NaN, lengths, starts and a centre."""
    torch.manual_seed(2)
    keys = torch.full((shape.batch, shape.heads, REGIONS.held + 5, shape.head_dim), torch.nan, dtype=shape.dtype)
    lengths = torch.tensor([max(1, shape.tokens - 9 * b) for b in range(shape.batch)], dtype=torch.int32)
    starts = (lengths - 1 - REGIONS.window).clamp(min=REGIONS.sink)
    for b in range(shape.batch):
        for position in range(int(lengths[b]) - 1):  # the newest token is not there yet
            if position < REGIONS.sink or position >= starts[b]:
                place = position if position < REGIONS.sink else REGIONS.sink + (position - REGIONS.sink) % REGIONS.ring
                keys[b, :, place] = torch.randn(shape.heads, shape.head_dim).to(shape.dtype)
    return shape.query(), keys, lengths, starts, torch.randn(shape.batch, shape.heads, shape.head_dim)


@over_shapes
def test_held_mass_is_a_sum_over_tokens(shape: Shape) -> None:
    query, keys, lengths, starts, centre = slab(shape)
    found = held_mass.definition(query, keys.nan_to_num(1.0), lengths, starts, centre, regions=REGIONS, scale=0.2)
    for b in range(shape.batch):
        for h in range(shape.q_heads):
            kv = h // shape.group
            known = keys[b, kv][~keys[b, kv].isnan().any(dim=1)].double()
            logits = (known - centre[b, kv].double()) @ query[b, h].double() * 0.2
            want = float(logits.logsumexp(0)) if len(known) else -math.inf
            assert float(found[b, kv, h % shape.group]) == pytest.approx(want, rel=1e-4, abs=1e-4)


@triton_only
@over_shapes
def test_held_mass_kernel(shape: Shape, device: torch.device) -> None:
    query, keys, lengths, starts, centre = (x.to(device) for x in slab(shape))
    how = {"regions": REGIONS, "scale": 0.2}
    found = held_mass.launch(query, keys, lengths, starts, centre, **how)
    close(found, held_mass.definition(query, keys.nan_to_num(1.0), lengths, starts, centre, **how), torch.float32)
