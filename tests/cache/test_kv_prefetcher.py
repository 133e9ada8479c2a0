"""Earlier rows come back in blocks, in order and whole."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache import kv_prefetcher
from kvthaw.cache.device_memory import DeviceBlocks, DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.kv_prefetcher import KVPrefetcher
from kvthaw.kernels.dense import LONG, RUN, runs

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
    store.allocator.device = DeviceBlocks(DeviceMemory(1 << 30, [0]), 0, store.allocator.shape, torch.float32, device)
    store.append(1, rows.to(device))
    for stop in (70000, 5):
        blocks = [block.cpu() for block in KVPrefetcher().blocks(store, 1, stop, device, queries=queries)]
        assert torch.equal(torch.cat(blocks, dim=1), rows[:, :stop])
        assert [block.shape[1] for block in blocks] == runs(stop, LONG if queries == 512 else RUN)


@pytest.mark.parametrize("span", [(0, 70), (3, 70), (8, 24), (9, 10), (5, 5), (7, 33)])
def test_copy_to(span: tuple[int, int]) -> None:
    store, rows = filled(70, 8)
    block = torch.full((HEADS, span[1] - span[0], 2, DIM), torch.nan)
    store.copy_to(block, 0, span[0])
    assert torch.equal(block, rows[:, slice(*span)])
    with pytest.raises(IndexError, match="holds 70"):
        store.copy_to(torch.empty(HEADS, 2, 2, DIM), 0, 69)


@pytest.mark.gpu
def test_gpu_a_block_is_not_overwritten_while_it_is_read(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Slow work on every block, twice over: the copies that come meanwhile go to the other one."""
    monkeypatch.setattr(kv_prefetcher, "RUN", 1024)
    store, rows = filled(8192, 256, pinned=True)
    way, big, places = KVPrefetcher(), torch.randn(4096, 4096, device=device), set[int]()
    for _ in range(2):
        found = []
        for block in way.blocks(store, 0, 8192, device):
            for _ in range(4):
                big = (big @ big).clamp(-1, 1)
            found.append(block.clone())
            places.add(block.data_ptr())
        assert torch.equal(torch.cat(found, dim=1).cpu(), rows)
    assert len(places) == 2
    way.release()
    assert all(torch.equal(block.cpu(), rows[:, :1024]) for block in way.blocks(store, 0, 1024, device))
