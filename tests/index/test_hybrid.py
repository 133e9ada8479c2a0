"""PRKV's static set and restructured pages as an index."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.errors import ConfigError
from kvthaw.index import hybrid as module
from kvthaw.index import reordering
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.hybrid import HybridIndex, overlap_share
from kvthaw.index.reordering import choose_static
from kvthaw.kernels import observe, page_bounds
from kvthaw.regions import Regions

SMALL = partial(HybridIndex, page=8, interval=20)


def hybrid(seqs: Seqs) -> HybridIndex:
    assert isinstance(seqs.index, HybridIndex)
    return seqs.index


def table(index: HybridIndex, seq: int) -> list[Tensor]:
    """What select() reads of a sequence, copied."""
    index.join()
    host = index.seqs[seq]
    parts = [index.order[seq, :, : host.tokens], index.stops[seq, :, : host.units + 1], index.digests[seq, :, : host.units]]
    return [part.clone() for part in parts]


def run_all(seqs: Seqs) -> None:
    """Do what is spread over the coming steps."""
    assert seqs.context.aux is not None
    for _ in range(seqs.context.regions.buffer):
        seqs.context.aux.advance()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_static_set_is_what_the_window_attends_to() -> None:
    seqs = Seqs(SMALL, [200], heads=2, group=2)
    found = seqs.sets(40)[0]
    keys, queries = seqs.keys[0][:, FIRST : FIRST + 200], seqs.queries[0][:, :64]
    mass = observe.definition(queries.reshape(2, 128, 64), keys, torch.full((128,), 1 / 128), scale=64**-0.5)
    index = hybrid(seqs)
    for head in range(2):
        static = mass[head].topk(10).indices + FIRST
        assert set(static.tolist()) <= found[head]
        assert index.order[0, head, :10].tolist() == static.tolist()
        rest = [p for p in range(FIRST, FIRST + 200) if p not in set(static.tolist())]
        assert index.order[0, head, 10:200].tolist() == rest
        pages = page_bounds.definition(keys[head : head + 1, torch.tensor(rest) - FIRST], 8, spread="mean")
        torch.testing.assert_close(index.digests[0, head, :24], pages[0])


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_rows_are_the_definitions(share: float) -> None:
    """Algorithm 1 and the pages' bounds, in float64, one head at a time."""
    seqs = Seqs(partial(SMALL, share=share), [203], heads=2, group=1)
    found, count = seqs.sets(40)[0], int(40 * share)
    for head in range(2):
        keys, queries = seqs.keys[0][head, FIRST : FIRST + 203].double(), seqs.queries[0][head].double()
        scores = torch.softmax(queries[:64] @ keys.T * 64**-0.5, dim=1).mean(dim=0).tolist()
        ranked = sorted(range(203), key=lambda token: -scores[token])
        static = ranked[:count]
        rest = sorted(ranked[count:])
        pages = [rest[at : at + 8] for at in range(0, len(rest), 8)]
        query, bounds = queries[100], []
        for page in pages:
            own = keys[page]
            centre = (own.amax(dim=0) + own.amin(dim=0)) / 2
            apart = (centre - own).abs().mean(dim=0)
            bounds.append(float(torch.maximum(query * (centre - apart), query * (centre + apart)).sum()))
        best = sorted(range(len(pages)), key=lambda page: -bounds[page])
        dynamic = [token for page in best for token in pages[page]][: 40 - count]
        assert found[head] == {FIRST + token for token in (*static, *dynamic)}


def test_no_static_set_is_arkvale() -> None:
    hybrids, pages = Seqs(partial(SMALL, share=0.0), [100, 31]), Seqs(partial(BoundIndex, page=8, spread="mean"), [100, 31])
    for n in (16, 16, 5, 16):
        assert hybrids.sets(40) == pages.sets(40)
        hybrids.append(n)
        pages.append(n)
    assert hybrids.sets(40) == pages.sets(40)


def test_all_static_does_not_look_at_the_query() -> None:
    seqs = Seqs(partial(SMALL, share=1.0), [100])
    assert seqs.sets(40, step=100) == seqs.sets(40, step=101)


def test_every_step_sees_the_old_set_or_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are read in pieces, and observed in larger ones, some with each step."""
    monkeypatch.setattr(module, "_PIECE", 30 * 2 * 64 * 4)
    monkeypatch.setattr(reordering, "_OBSERVED", 50 * 2 * 64 * 4)
    seqs = Seqs(partial(SMALL, share=0.5), [200, 70])
    seqs.select(40, 64)
    index, changes = hybrid(seqs), 0
    for step in range(65, 130):
        before = [table(index, seq) for seq in range(2)]
        plans = [static.pending for static in index.statics]
        index.context.aux.advance()  # type: ignore[union-attr]
        seqs.select(40, step)
        assert all(same(table(index, seq), before[seq]) for seq in range(2))  # no step changes a set
        if step % 10 == 0:
            seqs.append(10)
            for seq in range(2):
                plan, now = plans[seq], table(index, seq)
                if plan is None:  # the old set, and the new tokens behind it
                    assert torch.equal(now[0][:, : before[seq][0].shape[1]], before[seq][0])
                    assert torch.equal(now[1][:, 0], before[seq][1][:, 0])
                else:  # the planned one whole, and the new tokens behind it
                    changes += 1
                    made = plan.take()
                    assert torch.equal(now[0][:, : made.order.shape[1]], made.order)
                    full = made.digests.shape[1] - 1
                    assert torch.equal(now[2][:, :full], made.digests[:, :full])
    assert changes == 2 * 3  # the first interval is shorter


def test_layers_take_turns() -> None:
    """Every layer chooses again every fourth append of eight tokens, and in every append a fourth of the layers do it."""
    begun: list[list[int]] = []
    for layer in range(12):
        seqs = Seqs(lambda shape, layer=layer: HybridIndex(replace(shape, layer=layer), page=8, interval=32), [60], heads=1)  # type: ignore[misc]
        seqs.select(40)
        begun.append([])
        for append in range(13):
            seqs.append(8)
            if hybrid(seqs).statics[0].pending is not None:
                begun[-1].append(append)
    assert all(later - one == 4 for appends in begun for one, later in pairwise(appends))
    assert all(len(appends) >= 3 for appends in begun)
    assert begun[0][0] == 3
    counts = Counter(append for appends in begun for append in appends)
    assert max(counts.values()) == 3


def test_a_refresh_uses_the_last_queries_before_it_began(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it the steps between have done, and whatever they asked."""
    monkeypatch.setattr(module, "_PIECE", 30 * 2 * 64 * 4)
    monkeypatch.setattr(reordering, "_OBSERVED", 50 * 2 * 64 * 4)
    for steps in (0, 3, 20):
        seqs = Seqs(partial(SMALL, share=0.5), [200], device=device)
        seqs.select(40, 100)
        for step in range(110, 190):  # more than the window's 64
            seqs.select(40, step)
        seqs.append(20)  # starts
        for step in range(steps):
            seqs.select(40, step)
            assert seqs.context.aux is not None
            seqs.context.aux.advance()
        seqs.append(1)  # puts in place
        keys, queries = seqs.keys[0][:, FIRST : FIRST + 220], seqs.queries[0][:, 126:190]
        weights = torch.full((128,), 1 / 128, device=device)
        mass = observe.definition(queries.reshape(2, 128, 64), keys, weights, scale=64**-0.5)
        index = hybrid(seqs)
        static = mass.topk(20, dim=1).indices + FIRST
        assert torch.equal(index.order[0, :, :20].sort(dim=1).values, static.int().sort(dim=1).values)


@pytest.mark.parametrize(
    ("share", "observed", "piece"), [(0.25, 500, 400), ("auto", 500, 30), (0.25, 70, 400), ("auto", 70, 30)]
)
def test_sequences_that_stand_alike_are_planned_at_once_and_as_alone(
    share: float | str, observed: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as have so many bytes of keys; the third of these has other tokens than the others."""
    calls: list[int] = []
    real = HybridIndex._pieces
    monkeypatch.setattr(
        HybridIndex, "_pieces", lambda self, seqs, *given: (calls.append(len(seqs)), real(self, seqs, *given))[1]
    )
    monkeypatch.setattr(module, "_KEYS", 2 * 240 * 2 * 64 * 4)
    monkeypatch.setattr(module, "_PIECE", piece * 2 * 64 * 4)
    monkeypatch.setattr(reordering, "_OBSERVED", observed * 2 * 64 * 4)
    make, prompts = partial(SMALL, share=share), [150, 150, 90, 150, 150]  # type: ignore[arg-type]
    deferred = Seqs(make, prompts)
    alone = [Seqs(make, [prompt], seeds=[seed]) for seed, prompt in enumerate(prompts)]
    for step, n in enumerate([20, 1, 9] * 3):
        assert deferred.sets(40, 100 + step) == [one.sets(40, 100 + step)[0] for one in alone]
        calls.clear()
        deferred.append(n)
        run_all(deferred)
        if n == 20:
            assert calls == ([2, 2, 1] if hybrid(deferred).statics[0].share is not None else [1] * 5)
        for seq, one in enumerate(alone):
            one.append(n)
            assert same(table(hybrid(deferred), seq), table(hybrid(one), 0))


def test_rows_known_at_the_prompt_or_at_the_first_step_are_the_same() -> None:
    late, early = Seqs(SMALL, [150, 63]), Seqs(SMALL, [150, 63], build=False)
    index = hybrid(early)
    index.rows = 40
    for seq, prompt in enumerate((150, 63)):
        keys = early.keys[seq][:, FIRST : FIRST + prompt]
        index.build(seq, FIRST, keys, keys, early.queries[seq][:, :64])
    assert index.turns[0].rows == 40
    for _ in range(4):
        assert late.sets(40) == early.sets(40)
        late.append(16)
        early.append(16)


def test_without_the_keys_in_the_store_pages_stay_as_they_are() -> None:
    seqs = Seqs(SMALL, [100])
    seqs.store.truncate(0, 0)
    assert seqs.sets(30) == Seqs(partial(SMALL, share=0.0), [100]).sets(30)


def test_a_prompt_that_was_never_built_gets_a_static_set_too() -> None:
    seqs = Seqs(SMALL, [0])
    seqs.append(60)
    seqs.select(40)
    assert hybrid(seqs).stops[0, :, 0].tolist() == [10, 10]


def test_auto_share_is_the_papers_equation() -> None:
    keys, queries = torch.randn(2, 120, 64), torch.randn(4, 2, 64)
    common = []
    for head in range(4):
        tops = [set((keys[head // 2] @ queries[head, i]).topk(50).indices.tolist()) for i in range(2)]
        common.append(len(tops[0] & tops[1]))
    assert overlap_share(queries, keys, 50, 8) == pytest.approx(8 * int(sum(common) / 4 / 8) / 50)
    assert overlap_share(queries[:, :1].expand(-1, 2, -1), keys, 48, 8) == 1.0


@pytest.mark.parametrize(("prompt", "rows"), [(0, 40), (30, 40)])
def test_auto_share_waits_until_it_says_something(prompt: int, rows: int) -> None:
    """One query agrees with itself, and two on all of no more keys than rows: 0.25 until a refresh sees more."""
    seqs = Seqs(partial(SMALL, share="auto"), [prompt])
    index = hybrid(seqs)
    if not prompt:
        seqs.append(60)  # never built: what the first select() asks with is the only query
    seqs.select(rows)
    assert (index.statics[0].share, index.stops[0, :, 0].tolist()) == (None, [10, 10])
    for step in range(150):
        seqs.select(rows, step)
        if step % 10 == 9:
            seqs.append(10)
            run_all(seqs)
            if index.statics[0].share is not None:
                break
    share, seen = index.statics[0].share, index.queries[0].index_select(1, (index.steps + torch.tensor([-64, -1])) % 64)
    assert share is not None
    assert share == overlap_share(seen, seqs.keys[0][:, FIRST : seqs.length[0]], rows, 8) < 1
    seqs.append(1)  # puts the plan in place
    assert index.stops[0, :, 0].tolist() == [int(share * rows)] * 2
    for _ in range(5):
        seqs.append(10)
    assert index.statics[0].share == share


def test_choose_static_keeps_the_others_in_text_order() -> None:
    order = choose_static(torch.tensor([[0.1, 0.5, 0.0, 0.9]]), 2, 10)
    assert order.tolist() == [[13, 11, 10, 12]]
    assert choose_static(torch.rand(2, 5), 0, 3).tolist() == [[3, 4, 5, 6, 7]] * 2
    for tokens, count in ((1, 0), (1, 1), (9, 9), (300, 299), (300, 1), (300, 77)):
        mass = torch.rand(2, tokens)
        top = torch.topk(mass, count, dim=1).indices.tolist()
        found = [[*own, *sorted(set(range(tokens)) - set(own))] for own in top]
        assert choose_static(mass, count, 0).tolist() == found


def test_reorder_and_clone_with_a_plan_under_way() -> None:
    seqs = Seqs(partial(SMALL, share=0.5), [150, 63, 0])
    seqs.select(40)
    seqs.append(20)
    seqs.select(40, 101)
    assert hybrid(seqs).statics[0].pending is not None
    other = Seqs(partial(SMALL, share=0.5), [0, 0, 0])
    other.index.clone_from(seqs.index)
    other.keys, other.length, other.queries = seqs.keys, list(seqs.length), seqs.queries
    for seq in range(3):
        other.put(seq, seqs.length[seq])
    for step, n in enumerate((10, 10, 10, 10)):
        assert other.sets(40, step) == seqs.sets(40, step)
        seqs.append(n)
        other.append(n)
    before = seqs.sets(40, 9)
    other.sets(40, 9)
    which = [1, 1, 0]
    for name in ("keys", "length", "queries"):
        setattr(seqs, name, [getattr(seqs, name)[seq] for seq in which])
    seqs.index.reorder(which)
    seqs.store.reorder(which)
    assert seqs.sets(40, 9) == [before[1], before[1], before[0]]
    seqs.append(20)
    seqs.append(20)
    found = seqs.sets(40, 9)
    assert found[0] == found[1]


def test_a_short_window_shortens_the_observation() -> None:
    """Queries older than the window may stand before keys that are indexed."""
    shape = Seqs(SMALL, [10]).context
    assert HybridIndex(shape).window == 64
    index = HybridIndex(replace(shape, regions=Regions(FIRST, 8, 8)))
    assert index.window == 8
    index.rows = 8
    keys, queries = torch.randn(2, 40, 64), torch.randn(4, 64, 64)
    index.build(0, FIRST, keys, keys, queries)
    assert torch.equal(index.queries[0].sort(dim=1).values, queries[:, -8:].sort(dim=1).values)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"share": 1.5}, "share is 1.5"), ({"share": "some"}, "share is 'some'"), ({"interval": 0}, "interval is 0")],
)
def test_settings_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Seqs(partial(HybridIndex, **options), [0])  # type: ignore[arg-type]


@pytest.mark.gpu
def test_selecting_from_a_captured_graph(device: torch.device) -> None:
    seqs = Seqs(SMALL, [400, 90], device=device, dtype=torch.bfloat16)
    query = seqs.query(0).clone()
    seqs.index.select(query, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = seqs.index.select(query, 64)
    for step in range(1, 12):
        query.copy_(seqs.query(step))
        selection.rows.fill_(-9)
        at = int(hybrid(seqs).steps)
        graph.replay()
        assert int(hybrid(seqs).steps) == at + 1
        assert torch.equal(hybrid(seqs).queries[:, :, at % hybrid(seqs).window], query)
        eager = seqs.index.select(query, 64)
        assert torch.equal(selection.rows, eager.rows)
        assert torch.equal(selection.counts, eager.counts)
        seqs.append(8)
        seqs.deferred.flush()  # as the cache does between captured steps


def test_an_undone_append_leaves_the_map_as_it_was() -> None:
    """The last page holds tokens that are not neighbours, where some of the last ones are static."""
    seqs = Seqs(lambda context: HybridIndex(context, page=8, share=0.5), [123])
    seqs.select(40)
    assert isinstance(seqs.index, HybridIndex)
    assert seqs.index.order is not None
    start = seqs.length[0]
    before = seqs.index.order[:, :, :123].clone()
    seqs.append(5)
    seqs.index.undo(0, start)
    assert torch.equal(seqs.index.order[:, :, :123], before)
    seqs.length[0] = start
    seqs.select(40)


@pytest.mark.parametrize("failing", ["log_sums", "mass", "choose_static", "page_bounds"])
@pytest.mark.parametrize("observed", [500, 50])
def test_a_piece_that_lacks_memory_is_done_again(failing: str, observed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reordering, "_OBSERVED", observed * 2 * 64 * 4)
    plain, short = (Seqs(partial(SMALL, share=0.5), [200, 200]) for _ in range(2))
    for seqs in (plain, short):
        seqs.select(40)
        seqs.append(20)
    real, failed = getattr(reordering, failing), list[int]()

    def fail(*given: Any, **how: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("no memory")
        return real(*given, **how)

    monkeypatch.setattr(reordering, failing, fail)
    run_all(short)
    assert failed
    for seqs in (plain, short):
        seqs.append(1)
    assert all(same(table(hybrid(plain), seq), table(hybrid(short), seq)) for seq in range(2))


def test_short_sequences_are_read_and_observed_in_few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One costs the host more than 2 MB of keys cost the bus. A sequence that goes meanwhile is not read."""
    reads: list[list[int]] = []
    real = HostStore.copy_keys
    monkeypatch.setattr(
        HostStore, "copy_keys", lambda self, seqs, *given: (reads.append(list(seqs)), real(self, seqs, *given))[1]
    )
    monkeypatch.setattr(module, "_PIECE", 400 * 2 * 64 * 4)
    for gone, found in ((False, [[0, 1], [2, 3], [4]]), (True, [[0], [2, 3], [4]])):
        seqs = Seqs(partial(SMALL, share=0.5), [150] * 5)
        seqs.select(40)
        reads.clear()
        seqs.append(20)
        assert seqs.context.aux is not None
        (work,) = seqs.context.aux._waiting
        assert len(work.jobs) == 3 + 1
        if gone:
            seqs.store.truncate(1, 0)
        run_all(seqs)
        assert reads == found


@pytest.mark.gpu
@pytest.mark.parametrize("observed", [500, 70])
def test_a_gpu_reads_and_observes_several_sequences_in_pieces(observed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 400 * 2 * 64 * 4)
    monkeypatch.setattr(reordering, "_OBSERVED", observed * 2 * 64 * 4)
    both = [Seqs(partial(SMALL, share=0.5), [150] * 5, device=torch.device(where)) for where in ("cuda", "cpu")]
    for step in range(4):
        for seqs in both:
            seqs.select(40, 100 + step)
            seqs.append(20)
            run_all(seqs)
            index = hybrid(seqs)
            index.take_effect(range(5))
            index.join()
        orders = [hybrid(seqs).order[:, :, :20].sort(dim=2).values.cpu() for seqs in both]  # type: ignore[index]
        assert (orders[0] == orders[1]).float().mean() > 0.97
        torch.cuda.synchronize()
