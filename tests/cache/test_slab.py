"""Sink, ring and pool in one tensor; the masks that say what of them holds a token; both transfers into them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvthaw.cache.choice import BulkCopy, UvaGather
from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.kernels.places import held, newest_place, write
from kvthaw.regions import Regions
from shapes import DTYPES, HEAD_DIMS

CPU = torch.device("cpu")
regions = st.builds(Regions, st.integers(0, 6), st.integers(1, 7), st.integers(1, 5))


def slab(of: Regions, seqs: int = 1, slots: int = 3) -> Slab:
    return Slab(seqs, 2, 4, of, slots, dtype=torch.float32, device=CPU)


def token(position: int) -> torch.Tensor:
    """A row [H, 2, D] that tells its position."""
    return position + torch.arange(16.0).reshape(2, 2, 4) / 100


@given(of=regions, lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3), steps=st.integers(0, 40))
def test_held_places_are_the_tokens_that_are_held(of: Regions, lengths: list[int], steps: int) -> None:
    """Prompts of their own lengths, then steps: what is held is sink and ring, no more and no less."""
    where = slab(of, len(lengths))
    starts = [of.first_indexed(n) for n in lengths]
    for seq, (n, start) in enumerate(zip(lengths, starts, strict=True)):
        for begin, end in ((0, min(of.sink, n)), (start, n)):
            if end > begin:
                where.write(seq, begin, torch.stack([token(p) for p in range(begin, end)], dim=1))
    for step in range(1, steps + 1):
        now = tuple(n + step for n in lengths)
        begins = tuple(of.indexed(start, n) for start, n in zip(starts, now, strict=True))
        counted, rings = torch.tensor(now, dtype=torch.int32), torch.tensor(begins, dtype=torch.int32)
        new = torch.stack([token(n - 1) for n in now])
        write(where.keys, where.values, (new[:, :, 0], new[:, :, 1]), newest_place(counted, of))
        mask = held(counted, rings, of)
        for seq, n in enumerate(now):
            rows = where.data[seq, :, : where.pool_start][:, mask[seq]]
            expected = [*range(min(of.sink, n)), *range(begins[seq], n)]
            assert sorted(rows[0, :, 0, 0].round().int().tolist()) == sorted(expected)
            stands = where.read(seq, begins[seq], n)
            assert stands[0, :, 0, 0].round().int().tolist() == list(range(begins[seq], n))
            if begins[seq] == of.sink:
                assert torch.equal(where.read(seq, 0, n)[:, : of.sink], where.data[seq, :, : min(n, of.sink)])
    assert (where.data[:, :, where.pool_start :] == 0).all(), "the pool is left alone"


def test_reorder() -> None:
    where = slab(Regions(2, 2, 1), seqs=2)
    where.write(0, 0, torch.stack([token(p) for p in range(4)], dim=1))
    where.reorder(torch.tensor([1, 0, 0]))
    assert (where.data[0] == 0).all()
    assert torch.equal(where.data[1], where.data[2])
    where.write(1, 4, token(9)[:, None])
    assert not where.tickets.any()
    assert not torch.equal(where.data[1], where.data[2]), "sequences are of their own afterwards"


def test_a_slab_starts_finite() -> None:
    assert (slab(Regions(2, 2, 2)).data == 0).all()


@pytest.mark.parametrize("transfer", [BulkCopy, UvaGather])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*zip(HEAD_DIMS, itertools.cycle(DTYPES), strict=False), *((64, dtype) for dtype in DTYPES[1:])]
)
def test_transfers_bring_what_is_wanted_and_nothing_else(
    transfer: type, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    if transfer is UvaGather:
        pytest.importorskip("triton")
    cuda = device.type == "cuda"
    seqs, heads, count, lengths = 2, 3, 5, [19, 40]
    of = Regions(3, 4, 2)
    host = HostStore(seqs, heads, head_dim, dtype, block_size=8, pinned=cuda)
    move = transfer()
    where = Slab(seqs, heads, head_dim, of, count, dtype=dtype, device=device)
    where.data.fill_(torch.nan)
    expected = where.data.clone()
    on = device if move.graph_safe else CPU
    for round_ in range(3):
        for seq, length in enumerate(lengths):
            host.append(seq, torch.randn(heads, length, 2, head_dim).to(dtype))
        fetch = torch.full((seqs, heads, count), -1, dtype=torch.int32)
        slots = torch.full_like(fetch, -1)
        for b in range(seqs):
            for h in range(heads):
                n = int(torch.randint(0, count + 1, ())) if round_ else 0
                fetch[b, h, :n] = torch.randperm(host.length(b))[:n].int()
                slots[b, h] = torch.randperm(count).int()
                for m in range(n):
                    row = int(fetch[b, h, m])
                    expected[b, h, of.held + int(slots[b, h, m])] = host.read(b, row, row + 1)[h, 0].to(device)
        move.fetch(host, where, fetch.to(on), slots.to(on))
        torch.testing.assert_close(where.data, expected, rtol=0, atol=0, equal_nan=True)
