"""Rows that the KV heads of a layer share: kernels beside definitions, and definitions beside loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, held_mass, share
from kvthaw.regions import Regions
from shapes import Shape, close, over_shapes

triton_only = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def drawn(batch: int, heads: int, width: int, ties: bool) -> tuple[Tensor, Tensor]:
    """Rows of which each head has another number, and their weights."""
    torch.manual_seed(0)
    weights = torch.randn(batch, heads, width) * 3 - torch.rand(batch, heads, 1) * 4
    weights = (weights.round() if ties else weights).clamp(max=1.9)
    rows = torch.randint(1, 4, (batch, heads, width), dtype=torch.int32).cumsum(2, dtype=torch.int32)
    none = torch.arange(width) >= torch.randint(0, width + 1, (batch, heads, 1))
    return rows.masked_fill(none, -1), weights.masked_fill(none, -torch.inf)


CASES = [(1, 1, 1, 1), (2, 3, 40, 60), (2, 8, 64, 256), (3, 5, 33, 0), (1, 4, 100, 399)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("batch", "heads", "width", "most"), CASES)
def test_the_heaviest_rows_of_all_heads_stay(batch: int, heads: int, width: int, most: int, ties: bool) -> None:
    rows, weights = drawn(batch, heads, width, ties)
    kept, counts = share.definition(rows, weights, most)
    for b in range(batch):
        lives = [(h, w) for h in range(heads) for w in range(width) if rows[b, h, w] >= 0]
        bins = {at: min(1023, max(0, int((float(weights[b, *at]) + 14) * 64))) for at in lives}
        chosen = set(sorted(lives, key=lambda at: (-bins[at], at))[:most])
        assert all(
            weights[b, *left] <= weights[b, *at] + 1 / 64 or weights[b, *left] < -13.9
            for left in lives
            if left not in chosen
            for at in chosen
        )
        for h in range(heads):
            mine = [int(rows[b, h, w]) for w in range(width) if (h, w) in chosen]
            assert kept[b, h].tolist() == mine + [-1] * (width - len(mine))
            assert counts[b, h] == len(mine)


@triton_only
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("batch", "heads", "width", "most"), CASES)
def test_share_kernel(batch: int, heads: int, width: int, most: int, ties: bool, device: torch.device) -> None:
    rows, weights = drawn(batch, heads, width, ties)
    given = rows.to(device), weights.to(device), most
    found, wanted = share.launch(*given), share.definition(*given)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


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
