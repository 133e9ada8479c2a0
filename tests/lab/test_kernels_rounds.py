"""Rounds of several bits take what rounds of one take."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lab import kernels_rounds


@pytest.mark.parametrize("room", [0, 1, 500, 976, 1 << 20])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_rounds_of_several_bits_take_the_same_rows(device: torch.device, room: int, bits: int) -> None:
    keys, sizes = kernels_rounds.drawn(2, 128, str(device))
    want = kernels_rounds.take(keys, sizes, room, kernels_rounds.HALVES, 4)()
    assert torch.equal(kernels_rounds.take(keys, sizes, room, bits, 4)(), want)
    assert (want.sum(dim=1) == torch.minimum(sizes.sum(dim=1), torch.tensor(room))).all()
