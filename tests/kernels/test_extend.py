"""The kernel that adds tokens to tables of units, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvthaw.kernels.extend import Added, Destination, Tables, definition, launch
from kvthaw.kernels.page_bounds import Spread
from shapes import DTYPES, TOLERANCE, poisoned

pytest.importorskip("triton")

HEADS, SEQS, RING = 2, 4, 112


def tables(head_dim: int, dtype: torch.dtype, device: torch.device, *, mapped: bool = True, wide: int = 1) -> Tables:
    """As an index holds them."""
    recent = torch.randn(SEQS, HEADS, RING, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers = {name: torch.full(shape, -7, dtype=torch.int32, device=device) for name, shape in (
        ("stops", (SEQS, HEADS, 130)), ("counts", (SEQS,)), ("order", (SEQS, HEADS, 300)),
    )}  # fmt: skip
    digests = poisoned(SEQS, HEADS, 129, wide * head_dim, dtype=dtype).to(device) if wide else None
    return Tables(recent.to(device), numbers["stops"], numbers["counts"], numbers["order"] if mapped else None, digests)


PLACES = [
    (1, 16, [Destination(2, 0, 0, 0)]),
    (96, 96, [Destination(2, 0, 120, 3), Destination(0, 16, 0, 0)]),
    (
        16,
        24,
        [Destination(0, 16, 48, 2), Destination(3, 0, 120, 5), Destination(1, 79, 120, 9)],
    ),  # of sequences that stand differently
    (6, 1, [Destination(1, 5, 33, 33), Destination(0, 0, 17, 17)]),
    (33, 32, [Destination(1, 31, 100, 4)]),  # over the end of what is kept
]


SPREADS: list[Spread | None] = [None, "mean", "max"]
KINDS = itertools.cycle(itertools.product(DTYPES, [64, 80]))
CASES = [(*case, kind) for case, kind in zip(itertools.product(PLACES, SPREADS), KINDS, strict=False)]


@pytest.mark.parametrize(("case", "spread", "kind"), CASES)
def test_against_the_definition(
    case: tuple[int, int, list[Destination]], spread: Spread | None, kind: tuple[torch.dtype, int], device: torch.device
) -> None:
    (new, size, places), (dtype, head_dim) = case, kind
    rows = torch.randn(2, len(places), HEADS, new, 2, head_dim).to(dtype).to(device)
    mapped, wide = spread is None, 1 if spread is None else 2
    both = [
        [Added(keys, tables(head_dim, dtype, device, mapped=mapped, wide=wide)) for keys in rows[..., 0, :]] for _ in range(2)
    ]
    definition(both[0], places, size=size, first=16, spread=spread)
    launch(both[1], places, size=size, first=16, spread=spread)  # keys as they come from the rings of two layers
    for (_, expected), (_, found) in zip(*both, strict=True):
        for name, own, other in zip(Tables._fields, found, expected, strict=True):
            if own is not None and other is not None:
                close = TOLERANCE[dtype] if name == "digests" else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(own, other, equal_nan=True, **close)
    others = [seq for seq in range(SEQS) if seq not in {place.seq for place in places}]
    assert found.digests is not None
    assert found.digests[others].isnan().all(), "other sequences are left as they were"
    assert (found.stops[others] == -7).all()
    assert torch.equal(found.recent[others], tables(head_dim, dtype, device).recent[others])


def test_what_it_writes(device: torch.device) -> None:
    own = tables(8, torch.float32, device)
    keys = torch.arange(HEADS * 5 * 8, dtype=torch.float32, device=device).view(1, HEADS, 5, 8)
    kept = own.recent[1, :, 10:14].clone()
    places = [Destination(1, kept=4, begin=10, before=2)]
    launch([Added(keys, own)], places, size=3, first=100)
    assert own.stops[1, :, :8].tolist() == [[-7, -7, -7, 13, 16, 19, -7, -7]] * HEADS
    assert own.counts.tolist() == [-7, 5, -7, -7]
    assert own.order is not None
    assert own.order[1, :, 13:20].tolist() == [[-7, 114, 115, 116, 117, 118, -7]] * HEADS
    assert torch.equal(own.recent[1, :, 14:19], keys[0])
    assert own.digests is not None
    assert own.digests[1, :, :3].isnan().all()
    members = torch.cat((kept[:, 3:], keys[0]), dim=1).unflatten(1, (2, 3))
    torch.testing.assert_close(own.digests[1, :, 3:5], members.mean(dim=2))


def test_others_may_make_the_digests(device: torch.device) -> None:
    own = tables(8, torch.float32, device, wide=0)
    places = [Destination(0, kept=0, begin=0, before=0)]
    launch([Added(torch.zeros(1, HEADS, 5, 8, device=device), own)], places, size=4, first=0)
    assert own.counts.tolist() == [2, -7, -7, -7]


def test_room_is_checked(device: torch.device) -> None:
    own = tables(8, torch.float32, device)
    keys, good = torch.zeros(1, HEADS, 5, 8, device=device), Destination(0, kept=0, begin=10, before=2)
    for bad, size in (({"kept": 108}, 4), ({"before": 128}, 4), ({"begin": 296}, 4), ({"before": 125}, 1)):
        places = [good._replace(**bad)]
        with pytest.raises(AssertionError, match="no room"):
            launch([Added(keys, own)], places, size=size, first=0)
    with pytest.raises(AssertionError, match="digests"):
        launch([Added(keys, own)], [good], size=4, first=0, spread="mean")
