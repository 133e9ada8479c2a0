"""flash_decode against its definition, kernels under the interpreter without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import flash_decode as module
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep, InSlab, Places, TokenOrder
from kvthaw.kernels.flash_decode import definition, flash_decode
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.split import Split, split_for, stages_for
from kvthaw.regions import Regions

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EIGHT_BITS = torch.float8_e4m3fn
EVERY = AnyOrder()


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


def same(found: Tensor, expected: Tensor) -> None:
    """Equal, NaN where there is NaN."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def compare(query: Tensor, keys: Tensor, values: Tensor, places: Places = EVERY, **how: Any) -> Partial:
    """flash_decode gives what its definition gives, and leaves keys, values and tickets as the definition leaves them. Returns the
    definition's."""
    how.setdefault("scale", query.shape[-1] ** -0.5)
    tickets = torch.zeros((query.shape[0], 1 + keys.shape[1]), dtype=torch.int32, device=query.device)
    ours = torch.stack((keys, values), dim=3)
    want = definition(DecodeStep(query, keys, values, **how), places)
    with poisoned():
        out = flash_decode(DecodeStep(query, ours[:, :, :, 0], ours[:, :, :, 1], **how), places, tickets)
        same(ours, torch.stack((keys, values), dim=3))
        assert not tickets.any()
    assert out.dtype == query.dtype
    limit = TOLERANCE[query.dtype if keys.dtype == EIGHT_BITS else keys.dtype]
    assert torch.isfinite(out).all()
    assert (out.float() - want.out).norm() <= limit * max(float(want.out.norm()), 1e-6)
    assert (out[want.lse == -torch.inf] == 0).all()
    return want


def hide(visible: Tensor, keys: Tensor, values: Tensor) -> None:
    """Fill what cannot be seen with NaN."""
    keys.masked_fill_(~visible[..., None], torch.nan)
    values.masked_fill_(~visible[..., None], torch.nan)


SHAPES = [(1, 1, 1, 1, 64), (2, 2, 4, 63, 64), (1, 2, 8, 130, 128), (2, 1, 3, 40, 80), (1, 1, 2, 33, 96), (1, 1, 20, 17, 192)]


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, itertools.cycle(TOLERANCE), strict=False)), ids=str)
def test_definition(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    batch, heads, group, n, dim = shape
    keys, values = slab(batch, heads, n, dim, dtype, device)
    query = torch.randn(batch, heads * group, dim, device=device).to(dtype)
    compare(query, keys, values)


def test_wide_heads(device: torch.device) -> None:
    keys, values = slab(1, 2, 50, 256, torch.bfloat16, device)
    query = torch.randn(1, 2, 256, device=device).bfloat16()
    compare(query, keys, values, softcap=50.0)


@pytest.mark.parametrize("blocks", [1, 2])
def test_keys_of_eight_bits(blocks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as what they are. The newest is such a number: the interpreter rounds others its own way."""
    monkeypatch.setattr(module, "split_for", lambda *_: Split(32, -(-70 // (32 * blocks)), 4, 1))
    keys, values = slab(2, 2, 70, 64, EIGHT_BITS, device)
    query, newest = torch.randn(2, 8, 64, device=device).bfloat16(), torch.randn(2, 2, 2, 64).to(EIGHT_BITS).bfloat16()
    lengths = torch.tensor([70, 23], dtype=torch.int32, device=device)
    compare(query, keys, values, TokenOrder(lengths, (newest[0].to(device), newest[1].to(device))))


def test_everything_at_once(device: torch.device) -> None:
    batch, heads, group, n, dim = 3, 2, 4, 33, 64
    keys, values = slab(batch, heads, n, dim, torch.bfloat16, device)
    query = torch.randn(batch, 2 * heads * group, dim, device=device).bfloat16()[:, ::2]  # strided
    visible = torch.rand(batch, heads, n, device=device) < 0.7
    log_weight = torch.randn(batch, heads * group, n, device=device)
    log_weight[:, 1, ::3] = -torch.inf
    lengths = torch.tensor([33, 30, 3], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 17, 3], dtype=torch.int32, device=device)  # the last sequence sees nothing
    place = torch.arange(n, device=device)
    hide(visible & (place < lengths[:, None, None]) & (place >= starts[:, None, None]), keys, values)
    others = [
        Partial(torch.randn(batch, heads * group, dim, device=device), torch.randn(batch, heads * group, device=device))
        for _ in range(2)
    ]
    others[0].lse[0, 0] = -torch.inf
    others[0].out[0, 0] = torch.nan
    places = TokenOrder(lengths, starts=starts, visible=visible)
    empty = compare(query, keys, values, places, scale=0.2)
    assert (empty.lse[2] == -torch.inf).all()
    compare(query, keys, values, places, scale=0.2, softcap=5.0, partials=others[:1])
    sinks = torch.randn(heads * group, device=device).bfloat16()
    compare(query, keys, values, places, scale=0.2, softcap=5.0, log_weight=log_weight, sinks=sinks, partials=others)


def test_expanded_and_spliced_masks(device: torch.device) -> None:
    """A mask may be a view that repeats over heads."""
    keys, values = slab(2, 2, 48, 64, torch.float32, device)
    visible = (torch.rand(2, 48, device=device) < 0.5)[:, None].expand(-1, 2, -1)
    hide(visible, keys, values)
    compare(torch.randn(2, 4, 64, device=device), keys, values, AnyOrder(visible))


def test_large_logits(device: torch.device) -> None:
    keys, values = slab(1, 1, 70, 64, torch.float32, device)
    compare(100 * torch.randn(1, 4, 64, device=device), keys, values, scale=1.0)


def test_lengths_that_do_not_fit(device: torch.device) -> None:
    """Bounds outside 0 .. N mean 0 and N; a start beyond the end sees nothing."""
    keys, values = slab(3, 1, 40, 64, torch.float32, device)
    starts = torch.tensor([-5, 30, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([99, 10, 0], dtype=torch.int32, device=device)
    got = compare(torch.randn(3, 2, 64, device=device), keys, values, TokenOrder(lengths, starts=starts))
    assert (got.lse[1:] == -torch.inf).all()


@dataclass
class Seqs:
    """A slab of NaN but for what its sequences hold: positions below `lengths` in the sink, `starts` .. `lengths` in the ring, and
    a random part of the pool. All but the newest token, which has not come yet."""

    regions: Regions
    lengths: list[int]
    slots: int
    heads: int = 2
    group: int = 4
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def make(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, InSlab]:
        """Query, keys and values, and which of these a step attends to."""
        of, batch = self.regions, len(self.lengths)
        starts = [of.indexed(of.sink, n) for n in self.lengths]
        data = torch.full((batch, self.heads, of.held + self.slots, 2, self.dim), torch.nan)
        live = torch.rand(batch, self.heads, self.slots) < 0.5
        for b, (start, length) in enumerate(zip(starts, self.lengths, strict=True)):
            for position in {*range(min(of.sink, length - 1)), *range(start, length - 1)}:
                place = position if position < of.sink else of.sink + (position - of.sink) % of.ring
                data[b, :, place] = torch.randn(self.heads, 2, self.dim)
        data[:, :, of.held :][live] = torch.randn(int(live.sum()), 2, self.dim)
        data = data.to(device, self.dtype)
        new = torch.randn(2, batch, self.heads, self.dim, device=device).to(self.dtype)
        lengths, first = (torch.tensor(each, dtype=torch.int32, device=device) for each in (self.lengths, starts))
        places = InSlab(of, lengths, first, (new[0], new[1]), live.to(device) if self.slots else None)
        query = torch.randn(batch, self.heads * self.group, self.dim, device=device).to(self.dtype)
        return query, data[:, :, :, 0], data[:, :, :, 1], places


@pytest.mark.parametrize(
    ("regions", "slots"),
    [(Regions(4, 8, 4), 40), (Regions(0, 5, 3), 1), (Regions(1, 1, 1), 0), (Regions(16, 30, 17), 1)],
    ids=str,
)
def test_slab(regions: Regions, slots: int, device: torch.device) -> None:
    """Every state of sink and ring, from an empty sequence to a ring that has gone round; the kernel sees what sequences hold, not
    NaN."""
    for some in ([0, 1, 2, 4, 5], [9, 17, 18, 130]):
        query, keys, values, places = Seqs(regions, some, slots, heads=2 if slots == 40 else 1).make(device)
        got = compare(query, keys, values, places)
        for b, length in enumerate(some):
            assert length == 0 or torch.isfinite(got.lse[b]).all()


@pytest.mark.parametrize(
    ("heads", "group", "dim", "dtype"),
    [(1, 1, 64, torch.float16), (3, 1, 80, torch.bfloat16), (2, 8, 128, torch.bfloat16), (1, 20, 96, torch.float32)],
)
def test_slab_shapes(heads: int, group: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    query, keys, values, places = Seqs(Regions(3, 20, 9), [50, 2], 17, heads, group, dim, dtype).make(device)
    compare(query, keys, values, places)


def test_slab_with_everything(device: torch.device) -> None:
    seqs = Seqs(Regions(3, 20, 9), [50, 2, 0], 17, dtype=torch.bfloat16)
    query, keys, values, places = seqs.make(device)
    log_weight = torch.randn(3, 8, keys.shape[2], device=device)
    log_weight[:, 1] = -torch.inf
    more = Partial(torch.randn(3, 8, 64, device=device), torch.randn(3, 8, device=device))
    got = compare(query, keys, values, places, softcap=5.0, log_weight=log_weight)
    assert (got.lse[:, 1] == -torch.inf).all(), "a head that draws nothing, the newest token included"
    compare(query, keys, values, places, sinks=torch.randn(8, device=device), partials=[more], log_weight=log_weight)


def test_newest_that_is_there_already(device: torch.device) -> None:
    """A layer that asks again with the same token gets the same answer and leaves the slab as it is."""
    query, keys, values, places = Seqs(Regions(2, 6, 3), [5, 30], 8).make(device)
    first = flash_decode(DecodeStep(query, keys, values, scale=0.1), places)
    before = keys.clone(), values.clone()
    assert torch.equal(flash_decode(DecodeStep(query, keys, values, scale=0.1), places), first)
    same(keys, before[0])
    same(values, before[1])


@pytest.mark.parametrize("n", [1, 32, 33])
def test_newest_in_token_order(n: int, device: torch.device) -> None:
    """Sequences that are full, half full, of one token and empty; what lies behind a sequence's end or before its start is NaN."""
    lengths = torch.tensor([n, max(1, n // 2), 1, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, max(0, n // 2 - 3), 0, 0], dtype=torch.int32, device=device)
    keys, values = slab(4, 2, n, 64, torch.float32, device)
    place = torch.arange(n, device=device)
    hide(((place < lengths[:, None] - 1) & (place >= starts[:, None]))[:, None].expand(-1, 2, -1), keys, values)
    newest = (torch.randn(4, 2, 64, device=device), torch.randn(4, 4, 64, device=device)[:, ::2])
    got = compare(torch.randn(4, 8, 64, device=device), keys, values, TokenOrder(lengths, newest, starts))
    assert (got.lse[3] == -torch.inf).all()
    alone = newest[1][2].repeat_interleave(4, dim=0)
    torch.testing.assert_close(got.out[2], alone)


def test_newest_is_seen_whatever_the_mask_says(device: torch.device) -> None:
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=device)
    keys, values = slab(2, 2, 40, 64, torch.float32, device)
    newest = (torch.randn(2, 2, 64, device=device), torch.randn(2, 2, 64, device=device))
    places = TokenOrder(lengths, newest, visible=torch.zeros(2, 2, 40, dtype=torch.bool, device=device))
    got = compare(torch.randn(2, 8, 64, device=device), keys, values, places)
    torch.testing.assert_close(got.out, newest[1].repeat_interleave(4, dim=1))


@pytest.mark.parametrize("splits", [1, 3])
def test_any_split_is_the_same(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = slab(2, 1, 100, 64, torch.float32, device)
    lengths = torch.tensor([100, 21], dtype=torch.int32, device=device)
    monkeypatch.setattr(module, "split_for", lambda *_: Split(16, splits, 4, 2))
    compare(torch.randn(2, 4, 64, device=device), keys, values, TokenOrder(lengths))


@pytest.mark.parametrize("n", [256, 1024, 2048, 32768, 1 << 20])
@pytest.mark.parametrize("pairs", [1, 8, 32, 128, 500])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_split_fills_the_device(n: int, pairs: int, dim: int) -> None:
    split = split_for(pairs, n, dim, 2, 132)
    assert split.block >= 16
    assert split.splits <= -(-n // split.block)
    assert pairs * split.splits >= min(100, pairs * n // 16)
    assert pairs == 500 or pairs * split.splits <= 264
    assert (split.stages == 1) == (split.splits * split.block >= n), "one block each, or several that follow each other"


@pytest.mark.parametrize("n", [2048 + 52, 2048 + 448, 4300, 8192 + 52, 32768])
@pytest.mark.parametrize("pairs", [1, 4, 8, 16, 128, 500, 2048])
@pytest.mark.parametrize(("dim", "itemsize"), [(64, 2), (128, 2), (256, 2), (128, 4)])
def test_programs_of_whole_blocks_leave_no_multiprocessor_without_work(n: int, pairs: int, dim: int, itemsize: int) -> None:
    split, scattered = (split_for(pairs, n, dim, itemsize, 132, scattered=True, whole=whole) for whole in (True, False))
    assert split.block * 2 * dim * itemsize <= 1 << 15
    assert split.stages == (2 if split.each else 1)
    assert not split.each or itemsize == 2
    assert pairs * split.splits >= min(132, pairs * scattered.splits)
    long = n >= 4096 and pairs >= 132 and itemsize == 2
    assert split.splits >= 2 or not long, "the longest of many sequences would have one program"


@pytest.mark.parametrize(
    ("tile", "shared", "stages"), [(32, 99, 3), (64, 227, 3), (64, 163, 3), (64, 99, 2), (64, 64, 1), (256, 99, 1)]
)
def test_blocks_ahead_fit_in_shared_memory(tile: int, shared: int, stages: int) -> None:
    assert stages_for(3, tile << 10, shared << 10) == stages


@pytest.mark.parametrize("broken", ["stride", "dtype", "lengths", "visible", "newest", "regions"])
def test_refuses_what_it_cannot_read(broken: str, device: torch.device) -> None:
    keys, values = slab(1, 1, 20, 64, torch.float32, device)
    query, new = (torch.randn(1, heads, 64, device=device) for heads in (2, 1))
    ones = torch.ones(1, dtype=torch.int32, device=device)
    if broken == "stride":
        keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
    elif broken == "dtype":
        values = values.half()
    others: dict[str, Places] = {
        "lengths": TokenOrder(torch.tensor([3], device=device)),
        "newest": TokenOrder(ones, (query[:, :, :32], query[:, :, :32])),
        "regions": InSlab(Regions(2, 4, 4), ones, ones, (new, new)),
        "visible": AnyOrder(torch.ones(1, 1, 20, device=device)),
    }
    with pytest.raises(AssertionError):
        flash_decode(DecodeStep(query, keys, values, scale=1.0), others.get(broken, EVERY))


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
    compare(query, keys, values, AnyOrder(visible))
    log_weight = torch.randn(batch, heads * group, n, device=device)
    sinks = torch.randn(heads * group, device=device)
    compare(query, keys, values, AnyOrder(visible), softcap=20.0, log_weight=log_weight, sinks=sinks)


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
    compare(query, keys, values, TokenOrder(lengths, starts=starts))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [1, 8])
def test_gpu_slab(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for regions, slots in ((Regions(128, 256, 512), 100), (Regions(16, 16, 16), 976), (Regions(0, 64, 32), 0)):
        query, keys, values, places = Seqs(regions, [5000, 700, 100, 17, 1, 0], slots, heads, 4, dim, dtype).make(device)
        compare(query, keys, values, places)


@pytest.mark.parametrize(
    ("dtype", "slots", "which", "bad"), [(torch.float32, 50, 0, torch.nan), (torch.bfloat16, 1, 1, torch.inf)], ids=str
)
def test_a_newest_that_is_not_finite_is_noted(
    device: torch.device, dtype: torch.dtype, slots: int, which: int, bad: float
) -> None:
    query, keys, values, places = Seqs(Regions(4, 10, 8), [9, 60], slots, 2, 4, 64, dtype).make(device)
    tickets = torch.zeros((2, 3), dtype=torch.int32, device=device)
    step = DecodeStep(query, keys, values, scale=0.1)
    flash_decode(step, places, tickets)
    assert not tickets.any()
    places.newest[which][1, 1, 63] = bad
    flash_decode(step, places, tickets)
    assert tickets.tolist() == [[0, 0, 0], [1, 0, 0]], "of the sequence that has it"


@pytest.mark.gpu
def test_gpu_last_program_merges(device: torch.device) -> None:
    """The same answer a thousand times, whichever program comes last."""
    query, keys, values, places = Seqs(Regions(16, 16, 16), [5000, 300, 40], 976, 8, 4, 128, torch.bfloat16).make(device)
    tickets = torch.zeros((3, 9), dtype=torch.int32, device=device)
    first = flash_decode(DecodeStep(query, keys, values, scale=0.1), places, tickets)
    found = [flash_decode(DecodeStep(query, keys, values, scale=0.1), places, tickets) for _ in range(1000)]
    assert all(torch.equal(one, first) for one in found)
    assert not tickets.any()


@pytest.mark.gpu
def test_gpu_captured_steps(device: torch.device) -> None:
    """A captured step takes in a token after the other where the lengths on the device say."""
    regions = Regions(4, 40, 30)
    query, keys, values, places = Seqs(regions, [30, 60], 50, 8, 4, 128, torch.bfloat16).make(device)
    theirs = torch.stack((keys, values), dim=3)
    tickets = torch.zeros((2, 9), dtype=torch.int32, device=device)
    flash_decode(DecodeStep(query, keys, values, scale=0.1), places, tickets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places.lengths.add_(1)
        got = flash_decode(DecodeStep(query, keys, values, scale=0.1), places, tickets)
    definition(DecodeStep(query, theirs[:, :, :, 0], theirs[:, :, :, 1], scale=0.1), places)
    for _ in range(12):
        for tensor in (query, *places.newest):
            tensor.normal_()
        graph.replay()
        want = definition(DecodeStep(query, theirs[:, :, :, 0], theirs[:, :, :, 1], scale=0.1), places).out
        assert (got.float() - want).norm() <= 1.6e-2 * want.norm()
        same(torch.stack((keys, values), dim=3), theirs)


@pytest.mark.gpu
def test_gpu_more_elements_than_int32(device: torch.device) -> None:
    keys, values = slab(9, 1, 1 << 20, 128, torch.bfloat16, device)
    compare(torch.randn(9, 4, 128, device=device).bfloat16(), keys, values)


@pytest.mark.gpu
def test_gpu_captured(device: torch.device) -> None:
    """A captured call follows lengths, query, keys and mask as they change on the device."""
    keys, values = slab(2, 8, 4096, 128, torch.bfloat16, device)
    query, visible = torch.randn(2, 32, 128, device=device).bfloat16(), torch.rand(2, 8, 4096, device=device) < 0.5
    lengths = torch.tensor([4096, 100], dtype=torch.int32, device=device)
    step, places = DecodeStep(query, keys, values, scale=0.1), TokenOrder(lengths, visible=visible)
    flash_decode(step, places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_decode(step, places)
    for length in (17, 4096, 0, 2049):
        lengths[0] = length
        query.normal_()
        keys.normal_()
        visible.bernoulli_(0.3)
        graph.replay()
        want = definition(step, places).out
        assert (got.float() - want).norm() <= 1.6e-2 * want.norm()
