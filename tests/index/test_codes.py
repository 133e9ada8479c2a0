"""ParisKV's index: summaries kept in step, selection against exact scores, the estimator's promise, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError
from kvthaw.index import codes
from kvthaw.index.codes import CodesIndex
from kvthaw.index.ratios import Ratios
from kvthaw.kernels import HAS_TRITON, bucket_topk, collide, encode, planes, rerank, signs, tiers
from kvthaw.kernels.query import in_bytes, rotate_queries
from kvthaw.kernels.srht import srht
from kvthaw.regions import Regions
from lab.ablated_codes import candidates

SINK = 4
DEFAULT = {"graded": True, "centre": True, "code_bits": 3}


def make(
    *,
    seqs: int = 1,
    heads: int = 2,
    group: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    rows: int = 0,
    kind: type[CodesIndex] = CodesIndex,
    **options: Any,
) -> CodesIndex:
    store, regions = HostStore(seqs, heads, dim, dtype), Regions(SINK, 8, 8)
    shape = IndexContext(
        0, heads * group, heads, dim, dtype, torch.device(device), store, regions, dim**-0.5, seed=5, rows=rows
    )
    return kind(shape, **options)


def fill(index: CodesIndex, seq: int, keys: Tensor, values: Tensor | None = None) -> None:
    index.build(seq, SINK, keys, keys if values is None else values, keys[:, -1:].repeat_interleave(index.context.group, dim=0))


def sets(selection: Selection) -> list[set[int]]:
    """The rows of every sequence and head, checked to be well formed."""
    rows, counts = selection.rows.flatten(0, 1), selection.counts.flatten()
    assert rows.dtype == counts.dtype == torch.int32
    found = []
    for row, n in zip(rows.tolist(), counts.tolist(), strict=True):
        chosen = row[:n]
        assert len(set(chosen)) == n
        assert all(at >= SINK for at in chosen)
        assert all(at == -1 for at in row[n:])
        found.append(set(chosen))
    return found


def same(a: CodesIndex, b: CodesIndex) -> None:
    """Equal where there are keys."""
    assert a.counts == b.counts
    for seq, n in enumerate(a.counts):
        assert torch.equal(a.tables["ids"][seq, :, :, :n], b.tables["ids"][seq, :, :, :n])
        for name in ("codes", "weights"):
            assert (name in a.tables) == (name in b.tables)
            if name in a.tables:
                assert torch.equal(a.tables[name][seq, :, :n], b.tables[name][seq, :, :n])
        assert torch.equal(a.tables["sizes"][seq], b.tables["sizes"][seq])
        for name in ("lengths", "wanted", "limits"):
            assert torch.equal(a.tables[name][seq], b.tables[name][seq])


@pytest.mark.parametrize("policy", ["max", "mean_query"])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (80, 4), (96, 1), (256, 4)])
def test_recall_with_all_candidates_is_limited_by_the_codes_alone(policy: str, dim: int, group: int) -> None:
    index = make(dim=dim, group=group, policy=policy, ratios=Ratios(rho=1.0, beta=1.0))
    keys, query = torch.randn(2, 3000, dim), torch.randn(1, 2 * group, dim)
    fill(index, 0, keys)
    scores = torch.einsum("bhgd,hnd->bhgn", query.reshape(1, 2, group, dim), keys) * dim**-0.5
    weight = {
        "max": lambda s: torch.log_softmax(s, dim=3).amax(dim=2),
        "mean_query": lambda s: s.mean(dim=2),
    }[policy](scores)
    best = (weight.topk(100, dim=2).indices + SINK).flatten(0, 1).tolist()
    hits = [len(found & set(exact)) for found, exact in zip(sets(index.select(query, 100)), best, strict=True)]
    assert min(hits) >= 80


@pytest.mark.parametrize("lengths", [(1, 63), (700, 0, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, DEFAULT])
def test_a_sequence_of_a_batch_is_the_sequence_alone(
    lengths: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    deferred = make(seqs=len(lengths), dtype=dtype, **options)
    keys = [torch.randn(2, n, 64).to(dtype) for n in lengths]
    query = torch.randn(len(lengths), 4, 64).to(dtype)
    for seq, part in enumerate(keys):
        fill(deferred, seq, part)
    both = deferred.select(query, 40)
    for seq, part in enumerate(keys):
        alone = make(dtype=dtype, **options)
        fill(alone, 0, part)
        one = alone.select(query[seq : seq + 1], 40)
        assert torch.equal(one.rows[0], both.rows[seq])
        assert torch.equal(one.counts[0], both.counts[seq])
    sets(both)


@pytest.mark.parametrize("length", [1, 39, 40])
def test_everything_is_selected_where_it_fits(length: int) -> None:
    index = make()
    fill(index, 0, torch.randn(2, length, 64))
    assert sets(index.select(torch.randn(1, 4, 64), 40)) == [set(range(SINK, SINK + length))] * 2


@pytest.mark.parametrize("options", [{}, DEFAULT])
def test_zero_keys_and_equal_keys_take_the_lowest_positions(options: dict[str, Any]) -> None:
    index = make(**options)
    fill(index, 0, torch.zeros(2, 500, 64))
    assert sets(index.select(torch.randn(1, 4, 64), 30)) == [set(range(SINK, SINK + 30))] * 2
    fill(index, 0, torch.ones(2, 500, 64))
    assert sets(index.select(torch.randn(1, 4, 64), 30)) == [set(range(SINK, SINK + 30))] * 2


@pytest.mark.parametrize("bits", [4, 3])
def test_append_equals_build_and_addresses_stay(bits: int) -> None:
    keys, query = torch.randn(2, 5000, 64), torch.randn(1, 4, 64)
    whole, parts = make(code_bits=bits), make(code_bits=bits)
    fill(whole, 0, keys)
    fill(parts, 0, keys[:, :4500])
    before = {name: tensor.data_ptr() for name, tensor in parts.tables.items()}
    for at in range(4500, 5000, 250):
        parts.append([0], keys[None, :, at : at + 250], keys[None, :, at : at + 250], None)
        parts.select(query, 20)
    assert before == {name: tensor.data_ptr() for name, tensor in parts.tables.items()}
    same(whole, parts)
    assert torch.equal(whole.select(query, 50).rows, parts.select(query, 50).rows)
    for _ in range(2):
        parts.append([0], keys[None], keys[None], None)
    assert parts.counts == [15000]
    assert parts.summaries.capacity >= 15000
    assert torch.equal(parts.summaries.sizes.sum(dim=3), torch.full_like(parts.summaries.sizes[..., 0], 15000))


def test_sequences_of_different_lengths_grow_together() -> None:
    keys = torch.randn(3, 2, 300, 64)
    index = make(seqs=3)
    for seq, n in enumerate((300, 0, 40)):
        fill(index, seq, keys[seq, :, :n])
    index.append([2, 1], keys[:2, :, :40], keys[:2, :, :40], None)
    assert index.counts == [300, 40, 80]
    other = make(seqs=3)
    fill(other, 0, keys[0])
    fill(other, 1, keys[1, :, :40])
    fill(other, 2, torch.cat((keys[2, :, :40], keys[0, :, :40]), dim=1))
    same(index, other)


@pytest.mark.parametrize("options", [{}, DEFAULT])
def test_truncate_reorder_and_state(options: dict[str, Any]) -> None:
    keys, query = torch.randn(2, 2, 900, 64), torch.randn(2, 4, 64)
    index, shorter = make(seqs=2, **options), make(seqs=2, **options)
    for seq in range(2):
        fill(index, seq, keys[seq, :, :300])
        fill(shorter, seq, keys[seq, :, :300])
        for one, stops in ((index, (333, 900)), (shorter, (333,) if seq else (333, 900))):  # products of the same sizes
            for start, stop in zip((300, 333), stops, strict=False):
                one.append([seq], keys[None, seq, :, start:stop], keys[None, seq, :, start:stop], None)
    index.truncate(1, SINK + 333)
    same(index, shorter)
    index.truncate(1, 5000)
    same(index, shorter)
    before = index.select(query, 25)
    copy = make(seqs=2, **options)
    copy.clone_from(index)
    same(copy, index)
    assert torch.equal(copy.select(query, 25).rows, before.rows)
    index.reorder([1, 0])
    swapped = index.select(query.flip(0), 25)
    assert torch.equal(swapped.rows.flip(0), before.rows)
    index.reorder([0, 0, 1])
    assert index.counts == [333, 333, 900]
    assert torch.equal(index.select(query[[1, 1, 0]], 25).rows, before.rows[[1, 1, 0]])
    index.truncate(0, 0)
    cleared = index.select(query[[1, 1, 0]], 25)
    assert cleared.counts[0].tolist() == [0, 0]
    assert torch.equal(cleared.rows[1], before.rows[1])
    assert not index.summaries.sizes[0].any()


@pytest.mark.parametrize(("bits", "nbytes"), [(4, 112), (3, 80)])
def test_the_summary_of_a_key_at_128_has_its_bytes(bits: int, nbytes: int) -> None:
    def a_key(dim: int) -> float:
        tables = make(dim=dim, heads=1, code_bits=bits).tables
        return sum(tables[name].nbytes for name in ("ids", "codes", "weights") if name in tables) / tables["ids"].shape[3]

    assert a_key(128) == nbytes
    assert a_key(64) == nbytes / 2


@pytest.mark.parametrize("bits", [2, 5, "3"])
def test_other_codes_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match=f"code_bits is {bits!r}; it must be one of 3, 4"):
        make(code_bits=bits)


def test_room_that_is_made_is_no_larger_than_asked_for() -> None:
    index = make()
    for tokens in (3 * collide.CHUNK, 4 * collide.CHUNK):
        index.make_room(1, tokens)
        assert index.summaries.capacity == tokens


def estimate(index: CodesIndex, query: Tensor) -> Tensor:
    """Return estimates of q.k for all keys of sequences of one length, [B, Hq, n] float32."""
    batch, heads = query.shape[0], index.context.kv_heads
    lengths = index.tables["lengths"][:batch]
    rotated = in_bytes(rotate_queries(query, heads, index.rotation, mean=False))
    every = torch.arange(max(index.counts), dtype=torch.int32).expand(batch, heads, -1).contiguous()
    scores = rerank.rerank(rotated, index.summaries, every, lengths, index.quantizer, index.context.scale)
    assert isinstance(scores, Tensor), "of the CPU"
    if "centre" in index.tables:
        centre = index.tables["centre"][:batch]
        scores = scores + torch.einsum("bhgd,bhd->bhg", query.unflatten(1, (heads, -1)), centre)[..., None]
    return scores.flatten(1, 2)


@pytest.mark.parametrize(("dim", "options"), [(64, {}), (96, {}), (128, {}), (256, {}), (64, DEFAULT)])
def test_estimates_have_slope_one(dim: int, options: dict[str, Any]) -> None:
    """The alignment correction's promise: regression of estimate on true inner product within 1 % of 1, over 10^5 pairs. Without
    it the slope would be .996: levels are means of what they stand for, and so a little short."""
    keys = torch.randn(1, 1000, dim) * torch.rand(1, 1000, 1) * torch.linspace(0.2, 3, dim)
    query = torch.randn(100, 1, dim)
    index = make(heads=1, group=1, dim=dim, **options)
    fill(index, 0, keys)
    index.reorder([0] * 100)
    true = torch.einsum("bhd,hnd->bhn", query, keys).flatten().double()
    found = estimate(index, query).flatten().double()
    slope = float((true * found).sum() / true.square().sum())
    correlation = float(torch.corrcoef(torch.stack((true, found)))[0, 1])
    assert abs(slope - 1) < 0.002
    assert correlation > (0.985 if options is DEFAULT else 0.99)


def test_keys_far_from_the_origin_are_told_apart_by_their_centre() -> None:
    """With one direction in all keys, their signs say little; graded votes and the centre find more, among as many candidates."""
    keys, query = torch.randn(2, 3000, 64) + 4 * torch.randn(2, 1, 64), torch.randn(8, 2, 64)
    exact = torch.einsum("bhd,hnd->bhn", query, keys).topk(100, dim=2).indices + SINK

    def ceiling(**options: Any) -> float:
        index = make(group=1, **options)
        fill(index, 0, keys)
        index.reorder([0] * 8)
        found = candidates(index, query, 100)
        assert ((found >= 0).sum(dim=2) == 300).all()
        return float((found[..., None] == exact[:, :, None]).any(dim=2).float().mean())

    ratios = Ratios(rho=0.2, beta=0.1)
    plain, graded, both = (ceiling(ratios=ratios, **o) for o in ({}, {"graded": True}, DEFAULT))
    assert graded > plain + 0.05
    assert both > graded + 0.2


def test_later_keys_are_seen_from_the_first_ones_centre() -> None:
    """A prompt's centre stays; what a sequence's later keys estimate is q.k all the same."""
    keys, query = torch.randn(2, 700, 64) + 3, torch.randn(1, 4, 64)
    index = make(**DEFAULT)
    fill(index, 0, keys[:, :500])
    centre = index.tables["centre"].clone()
    torch.testing.assert_close(centre[0], keys[:, :500].mean(dim=1))
    index.append([0], keys[None, :, 500:] + 5, keys[None, :, 500:], None)
    assert torch.equal(index.tables["centre"], centre)
    moved = torch.cat((keys[:, :500], keys[:, 500:] + 5), dim=1)
    want = torch.einsum("hgd,hnd->hgn", query.reshape(2, 2, 64), moved).reshape(1, 4, 700)
    assert float((estimate(index, query) - want).norm() / want.norm()) < 0.1


def test_candidates_are_what_is_chosen_from() -> None:
    """The votes' best by a plain count in float64, the lowest positions first; the rows chosen are the best of them."""
    index = make(seqs=3, group=1, ratios=Ratios(rho=0.4, beta=0.25))
    keys = torch.randn(3, 2, 400, 64)
    for seq, n in enumerate((400, 7, 0)):
        fill(index, seq, keys[seq, :, :n])
    query = torch.randn(3, 2, 64)
    found, again = candidates(index, query, 10), index.select(query, 10)
    assert (found.dtype, found.shape[:2]) == (torch.int32, (3, 2))
    assert ((found >= 0).sum(dim=2) == torch.tensor([100, 7, 0])[:, None]).all()
    for seq, head in itertools.product(range(3), range(2)):
        listed = found[seq, head, found[seq, head] >= 0].tolist()
        assert listed == sorted(set(listed))
        assert set(again.rows[seq, head, : again.counts[seq, head]].tolist()) <= set(listed)
    y, q = (srht(x[0].double(), index.rotation).reshape(2, -1, 8, 8) for x in (keys, query[:, :, None]))
    nearness = (q * torch.where(y >= 0, 1.0, -1.0)).sum(dim=3)  # [H, n, subspaces]
    before = (nearness[:, :, None] < nearness[:, None]).sum(dim=2)  # keys nearer than each
    ends = torch.tensor([8, 24, 48, 80, 120, 160])  # of 160 keys that collide
    votes = (before[..., None] < ends).sum(dim=(2, 3))
    best = torch.sort(votes, dim=1, descending=True, stable=True).indices[:, :100].sort(dim=1).values
    assert torch.equal(found[0, :, :100], best.int() + SINK)
    estimates = estimate(index, query)[0].gather(1, best)
    chosen = best.gather(1, estimates.topk(10).indices).sort(dim=1).values + SINK
    assert torch.equal(again.rows[0], chosen.int())


def test_looking_at_candidates_changes_nothing() -> None:
    index = make(ratios=Ratios(rho=0.4, beta=0.25))
    fill(index, 0, torch.randn(2, 400, 64))
    query = torch.randn(1, 4, 64)
    before, rows = {name: tensor.clone() for name, tensor in index.tables.items()}, index.select(query, 10).rows
    candidates(index, query, 10)
    assert torch.equal(index.select(query, 10).rows, rows)
    assert all(torch.equal(a, b) for name, a in before.items() if name != "wanted" for b in [index.tables[name]])


def test_a_sequence_attended_to_whole_has_no_candidates() -> None:
    index = make(seqs=2, dense_below=64)
    fill(index, 0, torch.randn(2, 100, 64))
    fill(index, 1, torch.randn(2, 50, 64))
    found = candidates(index, torch.randn(2, 4, 64), 10)
    assert ((found >= 0).sum(dim=2) == torch.tensor([50, 0])[:, None]).all()


def test_short_regions_are_attended_to_whole_where_asked() -> None:
    index = make(seqs=2, dense_below=64)
    keys, values = torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    fill(index, 0, keys[0], values[0])
    fill(index, 1, keys[1, :, :50], values[1, :, :50])
    query = torch.randn(2, 4, 64)
    selection = index.select(query, 10)
    assert selection.counts.tolist() == [[10, 10], [0, 0]]
    assert selection.partial is not None
    scores = torch.einsum("hgd,hnd->hgn", query[1].reshape(2, 2, 64), keys[1, :, :50]) / 8
    want = torch.einsum("hgn,hnd->hgd", scores.softmax(dim=2), values[1, :, :50]).reshape(4, 64)
    torch.testing.assert_close(selection.partial.out[1], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(selection.partial.lse[1], torch.logsumexp(scores, dim=2).flatten())
    assert (selection.partial.lse[0] == -torch.inf).all()
    index.append([1], keys[None, 1, :, 50:], values[None, 1, :, 50:], None)
    assert index.select(query, 10).partial is None


def bad(**options: Any) -> Callable[[], Any]:
    return lambda: make(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (bad(dim=4), "head_dim is 4"),
        (bad(policy="union"), "policy is 'union'"),
        (bad(policy="mean"), "policy is 'mean'; it must be one of max, mean_query"),
        (bad(dense_below=-1), "dense_below is -1"),
        (lambda: make(ratios=Ratios(candidates=50)).select(torch.randn(1, 4, 64), 51), "candidates is 50"),
        (lambda: candidates(make(ratios=Ratios(candidates=50)), torch.randn(1, 4, 64), 51), "candidates is 50"),
        (bad(rows=51, ratios=Ratios(candidates=50)), "candidates is 50; it must be at least the 51 rows"),
        (lambda: Ratios(rho=0.1, beta=0.2), "rho is 0.1 and beta is 0.2; rho must be at least beta"),
        (lambda: Ratios(beta=0.4), "rho is 0.3 and beta is 0.4; rho must be at least beta; give both"),
        (lambda: Ratios(rho=0.0), "rho is 0.0; it must be above 0 and at most 1"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["max", "mean_query"])
@pytest.mark.parametrize("options", [{}, DEFAULT, {"dense_below": 5600}])
def test_a_captured_select_replays_as_the_region_grows(policy: str, options: dict[str, Any]) -> None:
    index = make(seqs=2, group=4, dim=128, dtype=torch.bfloat16, device="cuda", policy=policy, **options)
    keys = torch.randn(2, 2, 9000, 128, device="cuda", dtype=torch.bfloat16)
    for seq, n in enumerate((8000, 5000)):
        fill(index, seq, keys[seq, :, :n])
    query = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    index.select(query, 100)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = index.select(query, 100)
    for length in (5000, 5500, 6000):
        query.copy_(torch.randn_like(query))
        graph.replay()
        again = index.select(query, 100)
        assert torch.equal(captured.rows, again.rows)
        assert torch.equal(captured.counts, again.counts)
        dense = length < options.get("dense_below", 0)
        assert captured.counts.tolist() == [[100, 100], [0, 0] if dense else [100, 100]]
        if captured.partial is not None:
            assert again.partial is not None
            torch.testing.assert_close(captured.partial.out, again.partial.out)
            assert torch.isfinite(captured.partial.lse[1]).all() == dense
            assert (captured.partial.lse[0] == -torch.inf).all()
        index.append([1], keys[:1, :, 8000:8500], keys[:1, :, 8000:8500], None)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, DEFAULT])
def test_the_device_selects_what_the_cpu_selects(options: dict[str, Any]) -> None:
    keys, query = torch.randn(2, 6000, 128), torch.randn(1, 8, 128)
    chosen = []
    for device in ("cpu", "cuda"):
        index = make(group=4, dim=128, device=device, **options)
        fill(index, 0, keys.to(device))
        chosen.append(sets(index.select(query.to(device), 100)))
    for a, b in zip(*chosen, strict=True):
        assert len(a & b) >= 98


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("dim", "group", "policy", "lengths", "options"),
    [(16, 2, "max", (256, 63), {}), (24, 1, "mean_query", (256,), {}), (24, 2, "max", (256,), DEFAULT)],
)
def test_kernels_in_a_row_select_what_the_definitions_select(
    dim: int,
    group: int,
    policy: str,
    lengths: tuple[int, ...],
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys taken in by two pieces, through every kernel; the same rows but for what bf16 rounds."""
    seqs, k = len(lengths), 40
    keys, query = torch.randn(seqs, 1, 256, dim), torch.randn(seqs, group, dim)
    for module in (codes, collide, signs, bucket_topk):
        monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(signs, "TILE", 128)
    monkeypatch.setattr(rerank, "shape", lambda run: (max(16, run), 4))

    def found(where: torch.device) -> Selection:
        index = make(seqs=seqs, heads=1, group=group, dim=dim, device=where, policy=policy, **options)
        for seq, n in enumerate(lengths):
            fill(index, seq, keys[seq, :, : n - 30].to(where))
            last = keys[seq : seq + 1, :, n - 30 : n].to(where)
            index.append([seq], last, last, None)
        chosen = index.select(query.to(where), k)
        return Selection(chosen.rows.cpu(), chosen.counts.cpu())

    plain = found(torch.device("cpu"))
    for module in (tiers, planes, signs, collide, bucket_topk, rerank, encode):
        monkeypatch.setattr(codes, module.__name__.rpartition(".")[2], module.launch)
    monkeypatch.setattr(codes, "count", encode.launch_count)
    by_kernels = found(device)
    assert torch.equal(by_kernels.counts, plain.counts)
    for a, b in zip(sets(by_kernels), sets(plain), strict=True):
        assert len(a & b) >= k - 2
