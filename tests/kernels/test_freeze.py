"""The kernel that copies what leaves the rings, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels.freeze import Span, definition, freeze
from shapes import poisoned

pytest.importorskip("triton")

SINK, RING, HEADS, SEQS, LAYERS = 5, 24, 2, 3, 2
SPANS = [
    [(1, 40, 47, 40)],
    [(0, 12, 12, 0), (2, 5, 5, 0)],  # sink and ring, sink alone; an index takes nothing
    [(2, 20, 36, 20), (0, 16, 32, 31), (1, 13, 29, 29)],  # over the ring's end, and over a block's; stored in part, and all
    [(0, 8, 14, 3)],  # more is stored than the index takes
]


def blocks(head_dim: int, dtype: torch.dtype) -> list[list[list[torch.Tensor]]]:
    made = [[[poisoned(HEADS, 16, 2, head_dim, dtype=dtype) for _ in range(3)] for _ in range(SEQS)] for _ in range(LAYERS)]
    return [[[block.pin_memory() for block in seq] for seq in own] for own in made] if torch.cuda.is_available() else made


@pytest.mark.parametrize(
    ("spans", "head_dim", "dtype"),
    [
        *((spans, 80, torch.bfloat16) for spans in SPANS),
        (SPANS[2], 256, torch.float32),
        (SPANS[2], 6, torch.float16),  # a row is no multiple of 16 bytes
    ],
)
def test_against_the_definition(spans: list[Span], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    slabs = [torch.randn(SEQS, HEADS, SINK + RING + 9, 2, head_dim).to(dtype).to(device) for _ in range(LAYERS)]
    most = max(stop - start for _, start, stop, _ in spans)
    rows, same = (poisoned(LAYERS, len(spans), HEADS, most, 2, head_dim, dtype=dtype).to(device) for _ in range(2))
    found, expected = blocks(head_dim, dtype), blocks(head_dim, dtype)
    definition(slabs, expected, 16, spans, same, sink=SINK, ring=RING)
    tables = [torch.tensor([[data.data_ptr() for data in seq] for seq in own]).to(device) for own in found]
    freeze(slabs, tables, 16, spans, rows, sink=SINK, ring=RING)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(rows, same, rtol=0, atol=0, equal_nan=True)
    for slab, taken, mine, theirs in zip(slabs, rows, found, expected, strict=True):
        whole, other = (torch.stack([torch.cat(seq, dim=1) for seq in own]) for own in (mine, theirs))
        torch.testing.assert_close(whole, other, rtol=0, atol=0, equal_nan=True)
        for out, (seq, start, stop, stored) in zip(taken, spans, strict=True):
            for row in range(min(start, stored), stop):
                there = slab[seq, :, row if row < SINK else SINK + (row - SINK) % RING].cpu()
                if row >= stored:
                    assert torch.equal(whole[seq, :, row], there)
                    whole[seq, :, row] = torch.nan
                if row >= start:
                    assert torch.equal(out[:, row - start].cpu(), there)
        assert whole.isnan().all(), "what stands beside them is left as it was"


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, torch.bfloat16), (8, torch.float32)])
def test_a_piece_of_a_prompt_goes_to_blocks(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Positions 13 to 40 of sequence 2, of which the first three are stored already, and 11 positions of sequence 0 behind them."""
    pieces = [own[None] for own in torch.randn(LAYERS, HEADS, 38, 2, head_dim).to(dtype).to(device)]
    none, spans = pieces[0].new_empty((LAYERS, 2, HEADS, 0, 2, head_dim)), [(2, 40, 40, 16), (0, 11, 11, 0)]
    found, expected = blocks(head_dim, dtype), blocks(head_dim, dtype)
    definition(pieces, expected, 16, spans, none, sink=0, ring=40, slots=[-13, 27])
    tables = [torch.tensor([[data.data_ptr() for data in seq] for seq in own]).to(device) for own in found]
    freeze(pieces, tables, 16, spans, none, sink=0, ring=40, slots=[-13, 27])
    if device.type == "cuda":
        torch.cuda.synchronize()
    for piece, mine, theirs in zip(pieces, found, expected, strict=True):
        whole, other = (torch.stack([torch.cat(seq, dim=1) for seq in own]) for own in (mine, theirs))
        torch.testing.assert_close(whole, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(whole[2, :, 16:40], piece[0, :, 3:27].cpu())
        assert torch.equal(whole[0, :, :11], piece[0, :, 27:].cpu())
        assert torch.cat((whole[2, :, :16], whole[2, :, 40:], whole[0, :, 11:], whole[1]), dim=1).isnan().all()


def test_what_a_method_evicts_is_read_alone(device: torch.device) -> None:
    slab, rows = torch.randn(SEQS, HEADS, 40, 2, 8, device=device), torch.empty(1, 1, HEADS, 4, 2, 8, device=device)
    freeze([slab], [None], 16, [(1, 6, 10, 10)], rows, sink=SINK, ring=RING)
    assert torch.equal(rows[0, 0], slab[1, :, 6:10])


def test_layout_is_checked(device: torch.device) -> None:
    slab, table = torch.zeros(2, HEADS, 40, 2, 8, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    rows, span = torch.empty(1, 1, HEADS, 4, 2, 8, device=device), (0, 0, 4, 0)
    for bad in ((slab[:, :, ::2], table, rows), (slab, table.int(), rows), (slab, table, rows[0]), (slab, table, rows.half())):
        with pytest.raises(AssertionError):
            freeze([bad[0]], [bad[1]], 16, [span], bad[2], sink=5, ring=24)
