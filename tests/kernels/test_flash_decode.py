"""flash_decode against its definition, kernels under the interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import flash_decode as module
from kvthaw.kernels import sparse_decode as sparse
from kvthaw.kernels.flash_decode import definition, flash_decode, flash_decode_partial, split_for
from kvthaw.types import Partial

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever torch.empty gives meanwhile is NaN."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", nan)
        yield


def slab(batch: int, heads: int, n: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values interleaved, as in the cache."""
    data = torch.randn(batch, heads, n, 2, dim, device=device).to(dtype)
    return data[:, :, :, 0], data[:, :, :, 1]


def compare(query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Partial:
    how.setdefault("scale", query.shape[-1] ** -0.5)
    want = definition(query, keys, values, **how)
    with poisoned():
        out = flash_decode(query, keys, values, **how)
        got = flash_decode_partial(query, keys, values, **how)
    assert out.dtype == query.dtype
    limit = TOLERANCE[keys.dtype]
    assert torch.equal(got.lse == -torch.inf, want.lse == -torch.inf)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=limit)
    for result in (out.float(), got.out):
        assert torch.isfinite(result).all()
        assert (result - want.out).norm() <= limit * max(float(want.out.norm()), 1e-6)
        assert (result[want.lse == -torch.inf] == 0).all()
    return got


def hide(visible: Tensor, keys: Tensor, values: Tensor) -> None:
    """Fill what cannot be seen with NaN."""
    keys.masked_fill_(~visible[..., None], torch.nan)
    values.masked_fill_(~visible[..., None], torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "group", "n", "dim"),
    [(1, 1, 1, 1, 64), (2, 2, 4, 63, 64), (1, 2, 8, 130, 128), (2, 1, 3, 40, 80), (1, 1, 2, 33, 96), (1, 1, 20, 17, 192)],
)
def test_definition(batch: int, heads: int, group: int, n: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    keys, values = slab(batch, heads, n, dim, dtype, device)
    query = torch.randn(batch, heads * group, dim, device=device).to(dtype)
    compare(query, keys, values)


def test_wide_heads(device: torch.device) -> None:
    keys, values = slab(1, 2, 50, 256, torch.bfloat16, device)
    query = torch.randn(1, 2, 256, device=device).bfloat16()
    compare(query, keys, values, softcap=50.0)


def test_everything_at_once(device: torch.device) -> None:
    batch, heads, group, n, dim = 3, 2, 4, 75, 64
    keys, values = slab(batch, heads, n, dim, torch.bfloat16, device)
    query = torch.randn(batch, 2 * heads * group, dim, device=device).bfloat16()[:, ::2]  # strided
    visible = torch.rand(batch, heads, n, device=device) < 0.7
    log_weight = torch.randn(batch, heads * group, n, device=device)
    log_weight[:, 1, ::3] = -torch.inf
    lengths = torch.tensor([75, 40, 3], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 17, 3], dtype=torch.int32, device=device)  # the last lane sees nothing
    place = torch.arange(n, device=device)
    hide(visible & (place < lengths[:, None, None]) & (place >= starts[:, None, None]), keys, values)
    others = [
        Partial(torch.randn(batch, heads * group, dim, device=device), torch.randn(batch, heads * group, device=device))
        for _ in range(2)
    ]
    others[0].lse[0, 0] = -torch.inf
    others[0].out[0, 0] = torch.nan
    how: dict[str, Any] = {"scale": 0.2, "visible": visible, "lengths": lengths, "starts": starts}
    empty = compare(query, keys, values, **how)
    assert (empty.lse[2] == -torch.inf).all()
    compare(query, keys, values, **how, softcap=5.0)
    compare(query, keys, values, **how, log_weight=log_weight)
    compare(query, keys, values, **how, sinks=torch.randn(heads * group, device=device))
    compare(query, keys, values, **how, partials=others[:1])
    sinks = torch.randn(heads * group, device=device).bfloat16()
    compare(query, keys, values, **how, softcap=5.0, log_weight=log_weight, sinks=sinks, partials=others)


def test_expanded_and_spliced_masks(device: torch.device) -> None:
    """A mask may be a view that repeats over heads."""
    keys, values = slab(2, 2, 48, 64, torch.float32, device)
    visible = (torch.rand(2, 48, device=device) < 0.5)[:, None].expand(-1, 2, -1)
    hide(visible, keys, values)
    compare(torch.randn(2, 4, 64, device=device), keys, values, visible=visible)


def test_large_logits(device: torch.device) -> None:
    keys, values = slab(1, 1, 70, 64, torch.float32, device)
    compare(100 * torch.randn(1, 4, 64, device=device), keys, values, scale=1.0)


def test_lengths_that_do_not_fit(device: torch.device) -> None:
    """Bounds outside 0 .. N mean 0 and N; a start beyond the end sees nothing."""
    keys, values = slab(3, 1, 40, 64, torch.float32, device)
    starts = torch.tensor([-5, 30, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([99, 10, 0], dtype=torch.int32, device=device)
    got = compare(torch.randn(3, 2, 64, device=device), keys, values, starts=starts, lengths=lengths)
    assert (got.lse[1:] == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_any_split_is_the_same(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = slab(2, 1, 100, 64, torch.float32, device)
    lengths = torch.tensor([100, 21], dtype=torch.int32, device=device)
    monkeypatch.setattr(module, "split_for", lambda *_: module.Split(16, splits, 4, 2))
    compare(torch.randn(2, 4, 64, device=device), keys, values, lengths=lengths)


def test_agrees_with_sparse_decode(device: torch.device) -> None:
    keys, values = slab(2, 2, 40, 64, torch.float32, device)
    query, visible = torch.randn(2, 4, 64, device=device), torch.rand(2, 2, 40, device=device) < 0.6
    want = sparse.definition(query, keys, values, visible, scale=0.1, softcap=3.0)
    got = definition(query, keys, values, visible=visible, scale=0.1, softcap=3.0)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


@pytest.mark.parametrize("n", [256, 1024, 2048, 32768, 1 << 20])
@pytest.mark.parametrize("pairs", [1, 8, 32, 128, 500])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_split_fills_the_device(n: int, pairs: int, dim: int) -> None:
    split = split_for(pairs, n, dim, 2, 132)
    assert split.block >= 16
    assert split.splits <= -(-n // split.block)
    assert pairs * split.splits >= min(100, pairs * n // 16)
    assert pairs == 500 or pairs * split.splits <= 264


@pytest.mark.parametrize("broken", ["stride", "dtype", "lengths", "visible"])
def test_refuses_what_it_cannot_read(broken: str, device: torch.device) -> None:
    keys, values = slab(1, 1, 20, 64, torch.float32, device)
    query, how = torch.randn(1, 2, 64, device=device), {}
    if broken == "stride":
        keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
    elif broken == "dtype":
        values = values.half()
    elif broken == "lengths":
        how["lengths"] = torch.tensor([3], device=device)
    else:
        how["visible"] = torch.ones(1, 1, 20, device=device)
    with pytest.raises(AssertionError):
        flash_decode(query, keys, values, scale=1.0, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("batch", "heads", "group", "n"), [(1, 8, 4, 1024), (16, 8, 4, 2048), (3, 2, 8, 1000), (1, 8, 1, 257)])
def test_gpu_sparse(batch: int, heads: int, group: int, n: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    keys, values = slab(batch, heads, n, dim, dtype, device)
    query = torch.randn(batch, heads * group, dim, device=device).to(dtype)
    visible = torch.rand(batch, heads, n, device=device) < 0.8
    visible[-1, -1] = False
    hide(visible, keys, values)
    compare(query, keys, values, visible=visible)
    log_weight = torch.randn(batch, heads * group, n, device=device)
    sinks = torch.randn(heads * group, device=device)
    compare(query, keys, values, visible=visible, softcap=20.0, log_weight=log_weight, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32768, 131072, 1 << 20])
def test_gpu_dense(n: int, device: torch.device) -> None:
    keys, values = slab(2, 2, n, 128, torch.bfloat16, device)
    query = torch.randn(2, 8, 128, device=device).bfloat16()
    compare(query, keys, values)
    lengths = torch.tensor([n - 1, n // 3], dtype=torch.int32, device=device)
    starts = torch.tensor([7, 0], dtype=torch.int32, device=device)
    keys[1, :, n // 3 :] = torch.nan
    values[1, :, n // 3 :] = torch.nan
    compare(query, keys, values, lengths=lengths, starts=starts)


@pytest.mark.gpu
def test_gpu_more_elements_than_int32(device: torch.device) -> None:
    keys, values = slab(9, 1, 1 << 20, 128, torch.bfloat16, device)
    compare(torch.randn(9, 4, 128, device=device).bfloat16(), keys, values)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [flash_decode, flash_decode_partial])
def test_gpu_captured(call: Callable[..., Any], device: torch.device) -> None:
    """A captured call follows lengths, query, keys and mask as they change on the device."""
    keys, values = slab(2, 8, 4096, 128, torch.bfloat16, device)
    query, visible = torch.randn(2, 32, 128, device=device).bfloat16(), torch.rand(2, 8, 4096, device=device) < 0.5
    lengths = torch.tensor([4096, 100], dtype=torch.int32, device=device)
    how = {"scale": 0.1, "visible": visible, "lengths": lengths}
    call(query, keys, values, **how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(query, keys, values, **how)
    for length in (17, 4096, 0, 2049):
        lengths[0] = length
        query.normal_()
        keys.normal_()
        visible.bernoulli_(0.3)
        graph.replay()
        want = definition(query, keys, values, **how).out
        out = got if isinstance(got, Tensor) else got.out
        assert (out.float() - want).norm() <= 1.6e-2 * want.norm()
