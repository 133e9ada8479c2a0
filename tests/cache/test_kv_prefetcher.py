"""Earlier rows come back in blocks, in order and whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw.cache import kv_prefetcher
from kvthaw.cache.device_memory import DeviceBlocks, DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.kv_prefetcher import KVPrefetcher, bring_blocks, brought_addresses
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.dense import LONG, RUN, runs
from kvthaw.kernels.row_format import row_format
from kvthaw.kernels.stream_keys import stream_rows

HEADS, DIM = 2, 4


def filled(length: int, block_size: int, *, pinned: bool = False) -> tuple[HostStore, torch.Tensor]:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=block_size, pinned=pinned)
    rows = torch.randn(HEADS, length, 2, DIM)
    store.append(0, rows)
    return store, rows


@pytest.mark.parametrize("block_size", [1, 8, 12, 100])
@pytest.mark.parametrize("stop", [0, 1, 31, 32, 33, 70])
def test_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device, block_size: int, stop: int) -> None:
    monkeypatch.setattr(kv_prefetcher, "RUN", 32)
    store, rows = filled(70, block_size, pinned=device.type == "cuda")
    blocks = [block.cpu().clone() for block in KVPrefetcher().blocks(store, 0, stop, device)]
    assert torch.equal(torch.cat([rows[:, :0], *blocks], dim=1), rows[:, :stop])
    assert [block.shape[1] for block in blocks] == [min(32, stop - at) for at in range(0, stop, 32)]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [512, 32768])
def test_gpu_blocks_on_the_device_come_in_long_runs(queries: int, device: torch.device) -> None:
    """To the few queries of a chunk that others decode beside; from anywhere in the blocks, on the stream of the model alone."""
    store, rows = HostStore(2, HEADS, DIM, torch.float32, block_size=96, pinned=True), torch.randn(HEADS, 70000, 2, DIM)
    store.device = DeviceBlocks(DeviceMemory(1 << 30, [0]), 0, store.shape, torch.float32, device)
    store.append(1, rows.to(device))
    for stop in (70000, 5):
        blocks = [block.cpu() for block in KVPrefetcher().blocks(store, 1, stop, device, queries=queries)]
        assert torch.equal(torch.cat(blocks, dim=1), rows[:, :stop])
        assert [block.shape[1] for block in blocks] == runs(stop, LONG if queries == 512 else RUN)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("span", [(0, 70), (3, 70), (8, 24), (9, 10), (7, 33)])
def test_blocks_are_brought_as_they_lie(kv_dtype: Any, span: tuple[int, int], device: torch.device) -> None:
    """Whole, or the rows that are asked for of one; those that lie on the device are read where they are."""
    form = row_format(kv_dtype, DIM, torch.float32)
    store = HostStore(2, HEADS, DIM, torch.float32, block_size=8, pinned=device.type == "cuda", format=form)
    for seq in range(2):
        store.append(seq, torch.randn(HEADS, 70, 2, DIM))
    before, size = store.read(1, *span), store.block_bytes
    for some in ((), (1, 3, 4), range(9)):
        for block in (store.blocks(1)[i] for i in some):
            block.data, block.on_device = block.data.to(device), True
            block.place = block.data.data_ptr(), False
        store.table.changed(1)
        place = torch.zeros(10 * size, dtype=torch.uint8, device=device)
        addresses = place.data_ptr() + torch.arange(0, 10 * size, size, device=device)
        bring_blocks(store, 1, *span, place)
        rows = torch.empty((HEADS, span[1] - span[0], *form.tail), dtype=form.stored, device=device)
        table = brought_addresses(store, 1, *span, addresses)
        stream_rows(table, 8, span[0] % 8, rows)
        assert torch.equal(form.decode(rows).cpu(), before)
        brought = place.view(10, -1)[: len(table)].any(dim=1).tolist()
        assert brought == [span[0] // 8 + i not in some for i in range(len(table))]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("block_size", [96, 1000, 5000])
def test_gpu_rows_are_read_from_anywhere(
    kv_dtype: Any, block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks larger than a run among them, and stores of different kinds by turns."""
    monkeypatch.setattr(kv_prefetcher, "BLOCK", 1024)
    form = row_format(kv_dtype, DIM, torch.float32)
    mine = HostStore(1, HEADS, DIM, torch.float32, block_size=block_size, pinned=True, format=form)
    (other, rows), way = filled(3000, 100, pinned=True), KVPrefetcher()
    mine.append(0, rows)
    for store in (mine, other, mine):
        out = torch.empty(HEADS, 2950, 2, DIM, device=device)
        way.read(store, 0, 37, out)
        assert torch.equal(out.cpu(), store.read(0, 37, 2987))


@pytest.mark.gpu
def test_gpu_a_block_is_not_overwritten_while_it_is_read(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Slow work on every block, twice over: the copies that come meanwhile go elsewhere."""
    monkeypatch.setattr(kv_prefetcher, "RUN", 1024)
    store, rows = filled(8192, 256, pinned=True)
    way, big = KVPrefetcher(), torch.randn(4096, 4096, device=device)
    for _ in range(2):
        found = []
        for block in way.blocks(store, 0, 8192, device):
            for _ in range(4):
                big = (big @ big).clamp(-1, 1)
            found.append(block.clone())
        assert torch.equal(torch.cat(found, dim=1).cpu(), rows)
    way.release()
    assert all(torch.equal(block.cpu(), rows[:, :1024]) for block in way.blocks(store, 0, 1024, device))
