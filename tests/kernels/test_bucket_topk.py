"""The best of small integers: ties cut at the lowest positions, exactly as many as wanted."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels import bucket_topk as op
from kvthaw.kernels.collide import BINS, CHUNK, Scores

CASES = [  # lengths, wanted, largest score
    ((1,), (1,), 96),
    ((63, 0, 2048), (10, 0, 2048), 12),
    ((5000, 4097), (500, 1), 96),
    ((2049,), (2048,), 0),
    ((3000,), (300,), 127),
    ((5000,), (2500,), 1),
]


def by_hand(scores: list[int], wanted: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:wanted])


def draw(lengths: tuple[int, ...], most: int, device: torch.device) -> torch.Tensor:
    capacity = -(-max(lengths) // CHUNK) * CHUNK
    noise = torch.rand(len(lengths), 2, capacity, device=device)
    return (noise**3 * (most + 1)).int().clamp(max=most).to(torch.uint8)


@pytest.mark.parametrize(("lengths", "wanted", "most"), CASES)
def test_torch(lengths: tuple[int, ...], wanted: tuple[int, ...], most: int) -> None:
    scores = draw(lengths, most, torch.device("cpu"))
    limits = torch.tensor(lengths, dtype=torch.int32), torch.tensor(wanted, dtype=torch.int32)
    width = max(wanted) + 3
    found, marks = op.definition(scores, *limits, width)
    assert found.dtype == marks.dtype == torch.int32
    for seq, (n, want) in enumerate(zip(lengths, wanted, strict=True)):
        for head in range(2):
            row = found[seq, head].tolist()
            assert row == by_hand(scores[seq, head, :n].tolist(), want) + [-1] * (width - want)
            assert marks[seq, head].tolist() == [sum(i < at for i in row[:want]) for at in range(0, scores.shape[2], op.MARK)]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("lengths", "wanted", "most"), CASES)
def test_kernel(lengths: tuple[int, ...], wanted: tuple[int, ...], most: int, device: torch.device) -> None:
    scores = draw(lengths, most, device)
    limits = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, wanted))
    known = torch.arange(scores.shape[2], device=device) < limits[0][:, None]
    chunks = torch.where(known[:, None], scores.int(), -1).unflatten(2, (-1, CHUNK))
    counts = (chunks[:, :, None] >= torch.arange(BINS, device=device)[:, None, None]).sum(dim=4, dtype=torch.int32)
    made = Scores(scores, counts.contiguous(), counts.sum(dim=3, dtype=torch.int32))
    found, marks = op.launch(made, *limits, max(wanted) + 3)
    want, marked = op.definition(scores.cpu(), *(x.cpu() for x in limits), max(wanted) + 3)
    for seq, n in enumerate(wanted):
        assert torch.equal(found[seq, :, :n].cpu(), want[seq, :, :n])
        with_keys = -(-lengths[seq] // CHUNK) * CHUNK // op.MARK if n else 0
        assert torch.equal(marks[seq, :, :with_keys].cpu(), marked[seq, :, :with_keys])
