"""The kernel that writes what leaves the rings to host memory, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels.freeze import definition, freeze
from shapes import poisoned

pytest.importorskip("triton")

SINK, RING, HEADS, SEQS = 5, 24, 2, 3
SPANS = [
    [(1, 40, 7)],
    [(0, 0, 12), (2, 0, 5)],  # sink and ring, sink alone
    [(2, 20, 16), (0, 31, 1), (1, 13, 24)],  # over the ring's end, and over a block's
]


def blocks(head_dim: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    made = [[poisoned(HEADS, 16, 2, head_dim, dtype=dtype) for _ in range(3)] for _ in range(SEQS)]
    return [[block.pin_memory() for block in own] for own in made] if torch.cuda.is_available() else made


@pytest.mark.parametrize(
    ("spans", "head_dim", "dtype"),
    [
        *((spans, 80, torch.bfloat16) for spans in SPANS),
        (SPANS[2], 256, torch.float32),
        (SPANS[2], 6, torch.float16),  # a row is no multiple of 16 bytes
    ],
)
def test_against_the_definition(
    spans: list[tuple[int, int, int]], head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    slab = torch.randn(SEQS, HEADS, SINK + RING + 9, 2, head_dim).to(dtype).to(device)
    found, expected = blocks(head_dim, dtype), blocks(head_dim, dtype)
    definition(slab, expected, 16, spans, sink=SINK, ring=RING)
    table = torch.tensor([[data.data_ptr() for data in own] for own in found]).to(device)
    given = torch.tensor(spans, dtype=torch.int32, device=device)
    freeze(slab, table, 16, given, max(count for *_, count in spans), sink=SINK, ring=RING)
    if device.type == "cuda":
        torch.cuda.synchronize()
    whole = torch.stack([torch.cat(own, dim=1) for own in found])
    torch.testing.assert_close(whole, torch.stack([torch.cat(own, dim=1) for own in expected]), rtol=0, atol=0, equal_nan=True)
    for seq, start, count in spans:
        for row in range(start, start + count):
            place = row if row < SINK else SINK + (row - SINK) % RING
            assert torch.equal(whole[seq, :, row], slab[seq, :, place].cpu())
            whole[seq, :, row] = torch.nan
    assert whole.isnan().all(), "what stands beside them is left as it was"


def test_layout_is_checked(device: torch.device) -> None:
    slab, table = torch.zeros(2, HEADS, 40, 2, 8, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    spans = torch.zeros(1, 3, dtype=torch.int32, device=device)
    for bad in ((slab[:, :, ::2], table, spans), (slab, table.int(), spans), (slab, table, spans.long())):
        with pytest.raises(AssertionError):
            freeze(bad[0], bad[1], 16, bad[2], 1, sink=5, ring=24)
