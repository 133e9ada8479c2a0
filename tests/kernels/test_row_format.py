"""Rows of 8 bits: the definition against e4m3 itself, and every kernel that writes or reads them against the same rows in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import Block, HostMemory
from kvthaw.kernels.freeze import definition as frozen
from kvthaw.kernels.freeze import freeze
from kvthaw.kernels.row_format import E4M3, RowFormat, definition, encode, row_format
from kvthaw.kernels.stream_keys import stream_keys
from kvthaw.kernels.uva_gather import uva_gather
from kvthaw_baselines.kernels import stored_scores
from shapes import DTYPES, poisoned

HEADS, LENGTHS = 2, (37, 5, 64)
over_dtypes = pytest.mark.parametrize(("dim", "dtype"), [(64, DTYPES[1]), (20, DTYPES[2]), (6, DTYPES[0])], ids=str)


def limits(dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [9, 2, D] at e4m3's limits: zeros, the largest, subnormals, ties, the dtype's own limits, one with NaN and infinity."""
    rows = torch.randn(9, 2, dim, dtype=torch.float64)
    rows[0], rows[1, 0] = 0, 448
    rows[1, 1, :4] = torch.tensor([-448, 2**-9, 2**-10, -1.5 * 2**-9])
    rows[2] = torch.linspace(-1, 1, dim) * 2**-20
    rows[3, 0] = torch.linspace(1, 2, dim)
    rows[4, 0], rows[4, 1] = 6e4, -6e4
    rows[5] = torch.finfo(dtype).tiny * 1.5
    rows[6, 0, 0], rows[6, 1, 1] = torch.nan, -torch.inf
    rows = rows.to(dtype)
    if dtype != torch.float16:
        rows[7, 1, 0] = torch.finfo(dtype).max
    return rows


@over_dtypes
def test_a_row_is_e4m3_with_a_scale_a_part(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    format, rows = E4M3(dim, dtype), limits(dim, dtype)
    stored = definition(rows, format.row_bytes)
    decoded = format.decode(stored)
    assert decoded[6].isnan().all(), "what is not finite stays so"
    finite = [i for i in range(9) if i != 6]
    rows, decoded = rows[finite].double(), decoded[finite].double()
    most = rows.abs().amax(dim=2, keepdim=True).clamp(max=448 * 2.0**119)
    scale = torch.exp2(torch.ceil(torch.log2((most / 448).clamp(min=2.0**-95))))
    expected = (rows / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(decoded, expected)
    assert torch.equal(format.decode_keys(stored)[finite].double(), expected[:, 0])
    again = format.encode(decoded.to(dtype))
    assert torch.equal(format.decode(again).double(), decoded), "rounding twice rounds nothing more"
    assert stored.shape[-1] == format.row_bytes == 8 * -(-(8 + 2 * dim) // 8)


def test_other_formats_are_converted() -> None:
    rows, plain, eight = torch.randn(3, 5, 2, 20), row_format(None, 20, torch.float32), row_format("fp8", 20, torch.float32)
    stored = eight.encode(rows)
    assert plain.encode(rows) is plain.decode(rows) is plain.convert(rows) is rows
    assert torch.equal(eight.convert(rows), stored)
    assert eight.convert(stored) is stored
    assert torch.equal(plain.convert(stored), eight.decode(stored))
    keys, values = eight.rounded(*rows.unbind(-2))
    assert torch.equal(torch.stack((keys, values), dim=-2), eight.decode(stored))


@over_dtypes
def test_encode(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    pytest.importorskip("triton")
    rows, row_bytes = limits(dim, dtype), E4M3(dim, dtype).row_bytes
    found, expected = encode(rows.to(device), row_bytes).cpu(), definition(rows, row_bytes)
    finite = [i for i in range(9) if i != 6]
    assert torch.equal(found[finite], expected[finite])
    assert E4M3(dim, dtype).decode(found[6]).isnan().all()


def store(dim: int, dtype: torch.dtype) -> tuple[HostStore, HostStore]:
    """The same rows in 8 bits and, rounded, in full; NaN in what no sequence holds."""

    def new(self: HostStore, count: int) -> list[Block]:
        made = [HostMemory().allocate(self.shape, self.format.stored, pinned=self.pinned) for _ in range(count)]
        return [Block(data.fill_(0xFF if data.dtype == torch.uint8 else torch.nan)).share() for data in made]

    made = []
    for format in (E4M3(dim, dtype), RowFormat(dim, dtype)):
        made.append(HostStore(3, HEADS, dim, dtype, block_size=16, pinned=torch.cuda.is_available(), format=format))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostStore, "_new_blocks", new)
            for seq, length in enumerate(LENGTHS):
                rows = torch.randn(HEADS, length, 2, dim, generator=torch.Generator().manual_seed(seq)).to(dtype)
                made[-1].append(seq, E4M3(dim, dtype).decode(E4M3(dim, dtype).encode(rows)))
    return made[0], made[1]


@over_dtypes
def test_a_store_reads_what_it_was_given(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    eight, full = store(dim, dtype)
    assert eight.nbytes() < full.nbytes() or dim == 6
    for seq, length in enumerate(LENGTHS):
        for start, stop in ((0, length), (3, 5), (length - 1, length), (2, 2)):
            assert torch.equal(eight.read(seq, start, stop), full.read(seq, start, stop))
            assert torch.equal(eight.read_keys(seq, start, stop, device).cpu(), full.read(seq, start, stop)[:, :, 0])


@over_dtypes
def test_fetched_and_streamed(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    pytest.importorskip("triton")
    eight, full = store(dim, dtype)
    fetch = torch.stack([torch.randint(0, n, (HEADS, 7)) for n in LENGTHS]).int()
    fetch[:, :, 3] = -1
    fetch, slots = fetch.to(device), torch.arange(7, dtype=torch.int32, device=device).expand(3, HEADS, -1).contiguous()
    found, expected = (poisoned(3, HEADS, 4 + 7, 2, dim, dtype=dtype).to(device) for _ in range(2))
    for host, slab in ((eight, found), (full, expected)):
        uva_gather(host.table.on_cpu().to(device), 16, slab, fetch, slots, 4, None, host.format)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().any(), "what was not asked for is left as it was"

    keys = poisoned(HEADS, 20, dim, dtype=dtype).to(device)
    stream_keys(eight.table.row(0)[None].to(device), 16, 11, keys[None], eight.format)
    assert torch.equal(keys.cpu(), full.read(0, 11, 31)[:, :, 0])


@over_dtypes
def test_scored(dim: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(stored_scores, "SPLITS", 1)
    eight, full = store(dim, dtype)
    rows = torch.full((3, HEADS, stored_scores.TILE), -1, dtype=torch.int32)
    for seq, length in enumerate(LENGTHS):
        rows[seq, :, :length] = torch.stack([torch.randperm(length) for _ in range(HEADS)]).int()
    rows, wanted = rows.to(device), torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    query = torch.randn(3, 2 * HEADS, dim, device=device).to(dtype)
    true = stored_scores.definition(query, full.table.on_cpu(), 16, rows)
    assert torch.equal(stored_scores.definition(query, eight.table.on_cpu(), 16, rows, eight.format), true)
    made = stored_scores.launch(
        query, eight.table.on_cpu().to(device), 16, rows, wanted, scale=0.3, run=16, format=eight.format
    )
    for seq, length in enumerate(LENGTHS):
        torch.testing.assert_close(made.scores[seq, :, :, :length], true[seq, :, :, :length], rtol=1e-4, atol=1e-4)


@over_dtypes
def test_frozen_from_a_ring(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows become what is stored, in the ring too."""
    pytest.importorskip("triton")
    sink, ring, spans, format = 5, 24, [(2, 27, 6), (0, 1, 6)], E4M3(dim, dtype)
    slab = torch.randn(3, HEADS, sink + ring + 9, 2, dim).to(dtype)
    slab[0, :, 3, 1] = torch.inf
    blocks = [[torch.full((HEADS, 16, format.row_bytes), 7, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]
    pinned = torch.cuda.is_available()
    theirs = [[data.clone().pin_memory() if pinned else data.clone() for data in own] for own in blocks]
    rounded, before = slab.clone(), slab.clone()
    leaving = [(seq, start + 2, start + count, start) for seq, start, count in spans]
    taken, same = (torch.zeros(1, len(spans), HEADS, 6, 2, dim, dtype=dtype) for _ in range(2))
    frozen([rounded], [blocks], 16, leaving, same, sink=sink, ring=ring, format=format)
    slab = slab.to(device)
    table = torch.tensor([[data.data_ptr() for data in own] for own in theirs], device=device)
    taken = taken.to(device)
    freeze([slab], [table], 16, leaving, taken, sink=sink, ring=ring, format=format)
    torch.testing.assert_close(taken.cpu(), same, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(slab.cpu(), rounded, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded[:, :, sink + ring :], before[:, :, sink + ring :])
    for seq, start, count in spans:
        mine, its = torch.cat(theirs[seq], dim=1), torch.cat(blocks[seq], dim=1)
        torch.testing.assert_close(format.decode(mine), format.decode(its), rtol=0, atol=0, equal_nan=True)
        for row in range(start, start + count):
            place = row if row < sink else sink + (row - sink) % ring
            assert torch.equal(format.decode(its)[:, row].isfinite(), rounded[seq, :, place].isfinite())
        beside = [row for row in range(48) if not start <= row < start + count]
        assert (mine[:, beside] == 7).all(), "what stands beside them is left as it was"
