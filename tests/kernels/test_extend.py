"""The kernel that adds tokens to tables of units, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels.extend import Place, definition, launch
from shapes import DTYPES, HEAD_DIMS, poisoned

pytest.importorskip("triton")

HEADS, BATCH = 3, 96


def tables(head_dim: int, dtype: torch.dtype, device: torch.device, mapped: bool) -> dict[str, torch.Tensor | None]:
    """As an index holds them for one of two lanes."""
    whole = {
        "recent": poisoned(2, HEADS, BATCH, head_dim, dtype=dtype),
        "stops": torch.full((2, HEADS, 40), -7, dtype=torch.int32),
        "count": torch.full((2,), -7, dtype=torch.int32),
        "order": torch.full((2, HEADS, 300), -7, dtype=torch.int32),
    }
    found: dict[str, torch.Tensor | None] = {name: table.to(device) for name, table in whole.items()}
    return found if mapped else found | {"order": None}


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kept", "new", "size"), [(0, 1, 16), (0, 96, 96), (16, 16, 24), (79, 17, 24), (5, 40, 1), (0, 33, 32), (31, 1, 32)]
)
@pytest.mark.parametrize("mapped", [True, False])
def test_against_the_definition(
    head_dim: int, dtype: torch.dtype, kept: int, new: int, size: int, mapped: bool, device: torch.device
) -> None:
    if size == 1 and kept + new > 36:
        kept, new = 2, 34
    rows = torch.randn(HEADS, new, 2, head_dim).to(dtype).to(device)
    keys = rows[:, :, 0]  # as they come from a ring
    both = [tables(head_dim, dtype, device, mapped) for _ in range(2)]
    for step, own in zip((definition, launch), both, strict=True):
        lane = {name: None if table is None else table[1] for name, table in own.items()}
        step(keys, **lane, place=Place(kept, begin=120, before=3, size=size, first=16))
    for name, expected in both[0].items():
        if expected is not None:
            torch.testing.assert_close(both[1][name], expected, rtol=0, atol=0, equal_nan=True)
            assert (expected[0].isnan() if name == "recent" else expected[0] == -7).all(), "the other lane is left as it was"


def test_what_it_writes(device: torch.device) -> None:
    own = {name: None if t is None else t[0] for name, t in tables(8, torch.float32, device, True).items()}
    keys = torch.arange(HEADS * 5 * 8, dtype=torch.float32, device=device).view(HEADS, 5, 8)
    launch(keys, **own, place=Place(kept=4, begin=10, before=2, size=4, first=100))
    assert own["stops"][:, :8].tolist() == [[-7, -7, 10, 14, 18, 19, -7, -7]] * HEADS
    assert int(own["count"]) == 5
    assert own["order"][:, 13:20].tolist() == [[-7, 114, 115, 116, 117, 118, -7]] * HEADS
    assert torch.equal(own["recent"][:, 4:9], keys)


def test_room_is_checked(device: torch.device) -> None:
    own = {name: None if t is None else t[0] for name, t in tables(8, torch.float32, device, True).items()}
    keys, place = torch.zeros(HEADS, 5, 8, device=device), Place(kept=0, begin=10, before=2, size=4, first=0)
    for bad in ({"kept": 92}, {"before": 38}, {"begin": 296}, {"size": 1, "before": 35}):
        with pytest.raises(AssertionError):
            launch(keys, **own, place=place._replace(**bad))
