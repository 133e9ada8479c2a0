"""Bounding volumes, streamed keys and observation scores against their plain definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.streams import Streams
from kvthaw.kernels import HAS_TRITON, observe, page_bounds, stream_keys
from kvthaw.kernels.page_bounds import Spread

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PAGES = [(1, 16, 64), (63, 32, 96), (64, 32, 128), (50, 12, 256), (33, 16, 80), (40, 32, 192)]
WIDTHS = [(1, 1, 64), (70, 63, 96), (16, 100, 128), (4, 65, 256), (3, 33, 80), (5, 40, 192)]
triton = pytest.mark.skipif(not HAS_TRITON, reason="no Triton")


@triton
@pytest.mark.parametrize("spread", ["max", "mean"])
@pytest.mark.parametrize(("sizes", "dtype"), list(zip(PAGES, itertools.cycle(TOLERANCE), strict=False)))
def test_bounds_are_the_definition(
    sizes: tuple[int, int, int], dtype: torch.dtype, spread: Spread, device: torch.device
) -> None:
    tokens, page, dim = sizes
    keys = torch.randn(2, tokens, dim).to(dtype).to(device)
    for order in (None, torch.stack([torch.randperm(tokens)[: tokens // 2 + 1] for _ in range(2)]).to(device)):
        wanted = page_bounds.definition(keys, page, spread=spread, order=order)
        found = page_bounds.launch(keys, page, spread=spread, order=order)
        assert found.shape == wanted.shape
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@triton
def test_bounds_of_keys_that_are_not_contiguous(device: torch.device) -> None:
    rows = torch.randn(2, 40, 2, 64, device=device)
    found = page_bounds.launch(rows[:, :, 0], 16, spread="max")
    torch.testing.assert_close(found, page_bounds.definition(rows[:, :, 0], 16, spread="max"))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_max_bound_is_never_below_a_key(dtype: torch.dtype) -> None:
    keys, query = (3 * torch.randn(2, 77, 64)).to(dtype), torch.randn(2, 64).to(dtype).float()
    box = page_bounds.page_bounds(keys, 16, spread="max").float()
    bound = (torch.cat((query, query.abs()), dim=1)[:, None] * box).sum(dim=2)
    scores = (query[:, None] * keys.float()).sum(dim=2)
    assert (bound.repeat_interleave(16, dim=1)[:, :77] >= scores - 1e-4).all()


def mass(queries: Tensor, keys: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The attention that queries pay to keys, from the scores of all at once."""
    scores = scale * queries.float() @ keys.float().transpose(1, 2)
    return (torch.softmax(scores, dim=2) * weights[..., None]).sum(dim=1)


@pytest.mark.parametrize("path", ["definition", pytest.param("launch", marks=triton)])
@pytest.mark.parametrize(("sizes", "dtype"), list(zip(WIDTHS, itertools.cycle(TOLERANCE), strict=False)))
def test_observation_is_the_softmax(sizes: tuple[int, int, int], dtype: torch.dtype, path: str, device: torch.device) -> None:
    width, tokens, dim = sizes
    queries, keys = (torch.randn(2, n, dim).to(dtype).to(device) for n in (width, tokens))
    weights = torch.rand(width, device=device)
    weights[0] = 0.0 if width > 1 else 1.0
    wanted = mass(queries, keys, weights, dim**-0.5)
    found = getattr(observe, path)(queries, keys, weights, scale=dim**-0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    own = torch.stack((weights, weights.flip(0)))  # of each problem
    found = getattr(observe, path)(queries, keys, own, scale=dim**-0.5)
    assert torch.equal(found[0], getattr(observe, path)(queries, keys, weights, scale=dim**-0.5)[0])
    torch.testing.assert_close(found, mass(queries, keys, own, dim**-0.5), rtol=1e-4, atol=1e-5)


def test_observation_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, weights = torch.randn(2, 8, 64), torch.randn(2, 90, 64), torch.rand(8)
    monkeypatch.setattr(observe, "_SCORES", 100)
    found = observe.observe(queries, keys, weights, scale=0.3)
    torch.testing.assert_close(found, mass(queries, keys, weights, 0.3))


@pytest.mark.parametrize("path", ["store", *(pytest.param(way, marks=triton) for way in ("kernel", "few programs"))])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (96, torch.bfloat16), (256, torch.float16)])
def test_keys_stream_from_any_blocks(
    dim: int, dtype: torch.dtype, path: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostStore(2, 3, dim, dtype, block_size=16, pinned=device.type == "cuda")
    rows = torch.randn(3, 70, 2, dim).to(dtype)
    store.append(1, rows)
    if path == "few programs":
        monkeypatch.setattr(stream_keys, "_IN_FLIGHT", 1)
    for start, stop in [(0, 70), (5, 6), (15, 50), (9, 9)]:
        out = torch.zeros(3, stop - start + 4, dim, dtype=dtype, device=device)
        part = out[:, : stop - start]
        if path == "store":
            store.copy_keys([1], start, part[None])
        else:
            stream_keys.stream_keys(store.table.row(1)[None].to(device), 16, start, part[None])
        assert torch.equal(part.cpu(), rows[:, start:stop, 0])
        assert not out[:, stop - start :].any()


@pytest.mark.parametrize("path", ["store", pytest.param("few programs", marks=triton)])
def test_keys_of_several_sequences_are_copied_at_once(path: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(4, 2, 64, torch.bfloat16, block_size=16, pinned=device.type == "cuda")
    rows = [torch.randn(2, 70 + 20 * seq, 2, 64).bfloat16() for seq in range(4)]
    for seq, own in enumerate(rows):
        store.append(seq, own)
    monkeypatch.setattr(stream_keys, "_IN_FLIGHT", 1)
    whole = torch.zeros(3, 2, 80, 64, dtype=torch.bfloat16, device=device)
    which, out = [3, 0, 2], whole[:, :, 4:69]
    if path == "store":
        store.copy_keys(which, 5, out)
        with pytest.raises(IndexError, match=r"rows 6..71 of sequence 0, which holds 70"):
            store.copy_keys(which, 6, out)
    else:
        stream_keys.stream_keys(store.table.on_cpu()[which].to(device), 16, 5, out)
    for own, seq in zip(out, which, strict=True):
        assert torch.equal(own.cpu(), rows[seq][:, 5:70, 0])
    assert not whole[:, :, :4].any()
    assert not whole[:, :, 69:].any()


@triton
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (96, torch.bfloat16)])
def test_rows_stream_from_any_blocks(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    store = HostStore(2, 3, dim, dtype, block_size=16, pinned=device.type == "cuda")
    rows = torch.randn(3, 70, 2, dim).to(dtype)
    store.append(1, rows)
    table = store.table.on_cpu().to(device)[1]
    for start, stop in [(0, 70), (5, 6), (15, 50), (9, 9)]:
        out = torch.zeros(3, stop - start + 4, 2, dim, dtype=dtype, device=device)
        stream_keys.stream_rows(table, 16, start, out[:, : stop - start])
        assert torch.equal(out[:, : stop - start].cpu(), rows[:, start:stop])
        assert not out[:, stop - start :].any()


def test_keys_are_read_once_they_have_arrived() -> None:
    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    store, event = HostStore(1, 2, 64, torch.float32), Event()
    store.append(0, torch.randn(2, 30, 2, 64))
    store.read_keys(0, 3, 9, torch.device("cpu"))
    store.arriving = event  # type: ignore[assignment]
    found = store.read_keys(0, 3, 9, torch.device("cpu"))
    assert event.waited == 1
    assert torch.equal(found, store.read(0, 3, 9)[:, :, 0])


@pytest.mark.gpu
def test_keys_on_their_way_to_the_host_are_waited_for_on_the_device(device: torch.device) -> None:
    store, streams = HostStore(1, 8, 128, torch.bfloat16, pinned=True), Streams()
    store.claim([(0, 1 << 15)])
    for _ in range(3):
        keys = torch.randn(8, 1 << 15, 128, device=device).bfloat16()
        store.truncate(0, 0)
        rows = torch.stack((keys, keys), dim=2)
        with streams.offloading([store], rows):
            store.append(0, rows, non_blocking=True)
        assert torch.equal(store.read_keys(0, 0, 1 << 15, device), keys)
