"""The tokens before a chunk of a prompt come back in order, from the store and the ring."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache.host import HostStore
from kvthaw.cache.offloader import Offloader
from kvthaw.cache.pool import Slab
from kvthaw.cache.streams import Streams
from kvthaw.regions import Regions


@pytest.mark.parametrize(("keeps", "positions"), [(True, [*range(20)]), (False, [0, 1, *range(12, 20)])])
def test_the_past_is_all_that_was_not_evicted(keeps: bool, positions: list[int]) -> None:
    rows, store = torch.randn(2, 20, 2, 4), HostStore(1, 2, 4, torch.float32, block_size=4)
    slab = Slab(1, 2, 4, Regions(2, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
    slab.write(0, 0, rows[:, :2])
    slab.write(0, 12, rows[:, 12:])
    if keeps:
        store.append(0, rows[:, :14])
    past = list(Offloader(store, slab, Streams(), keeps=keeps).past(0, 20, 12, queries=4))
    assert torch.equal(torch.cat([keys[0] for keys, _ in past], dim=1), rows[:, positions, 0])
    assert torch.equal(torch.cat([values[0] for _, values in past], dim=1), rows[:, positions, 1])


def test_a_ring_is_filled_again_as_far_as_the_store_goes() -> None:
    rows, store = torch.randn(2, 20, 2, 4), HostStore(1, 2, 4, torch.float32, block_size=4)
    slab = Slab(1, 2, 4, Regions(2, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
    slab.write(0, 14, rows[:, 14:])
    store.append(0, rows[:, :14])
    Offloader(store, slab, Streams(), keeps=True).refill(0, 12, 20)
    assert torch.equal(slab.read(0, 12, 20), rows[:, 12:])
