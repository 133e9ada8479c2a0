"""The sum over GPUs against its definition, on one machine: the test writes what another GPU would have sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels.exchange import BLOCK, BUFFERS, Inbox, add_up, definition
from shapes import DTYPES

pytest.importorskip("triton")

GPUS, MOST = 4, 2 * BLOCK


def inboxes(dtype: torch.dtype, device: torch.device) -> list[Inbox]:
    """The inboxes of all GPUs, here on one device."""
    data = [torch.full((BUFFERS, GPUS, MOST), -0.0, dtype=dtype, device=device) for _ in range(GPUS)]
    addresses = torch.tensor([each.data_ptr() for each in data], device=device)
    return [
        Inbox(each, addresses, torch.zeros(MOST // BLOCK, dtype=torch.int32, device=device), i) for i, each in enumerate(data)
    ]


def drawn(*shape: int, like: Tensor) -> Tensor:
    """Integers, whose sums are exact in every dtype."""
    return torch.randint(-8, 9, shape).to(like.device, like.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 2])
def test_calls_of_several_sizes_add_up_what_arrived(dtype: torch.dtype, rank: int, device: torch.device) -> None:
    every = inboxes(dtype, device)  # which the kernel writes to
    mine = every[rank]
    calls = [0] * (MOST // BLOCK)
    for n in (MOST, 5, BLOCK, BLOCK + 1, 7, MOST, 1, MOST):
        parts = [drawn(1, n, like=mine.data) for _ in range(GPUS)]
        for part in parts:
            part[0, ::3], part[0, 1::5] = -0.0, float("nan")
        for program in range(-(-n // BLOCK)):
            own = slice(program * BLOCK, min(n, (program + 1) * BLOCK))
            for other in set(range(GPUS)) - {rank}:
                mine.data[calls[program] % BUFFERS, other, own] = parts[other][0, own] + 0.0
            calls[program] += 1
        torch.testing.assert_close(add_up(parts[rank], mine), definition(parts), rtol=0, atol=0, equal_nan=True)
    assert mine.calls.tolist() == calls


def test_each_gpu_sends_its_part_to_the_others(device: torch.device) -> None:
    """GPUs that run one after the other: each has what the later ones will send."""
    every = inboxes(torch.bfloat16, device)
    for call in range(5):
        parts = [drawn(3, 500, like=every[0].data) for _ in range(GPUS)]
        parts[1][0, :7] = -0.0
        for rank, inbox in enumerate(every):
            for later in range(rank + 1, GPUS):
                inbox.data[call % BUFFERS, later, : parts[0].numel()] = parts[later].flatten() + 0.0
            assert torch.equal(add_up(parts[rank], inbox), definition(parts)), (call, rank)
        for inbox in every:
            emptied = inbox.data[(call - 1) % BUFFERS].view(torch.int16)
            assert (emptied == -(1 << 15)).all()
