"""What is not selected is estimated from pages, whatever happened to the sequences: against a sum over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.codes import CodesIndex
from kvthaw.index.exact import ExactIndex
from kvthaw.index.forest import TreeIndex
from kvthaw.index.remainder import RemainderIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.kernels.remainder import Estimated
from kvthaw.methods import METHODS, resolve
from kvthaw.methods.icecache_digest import SETTINGS
from kvthaw.methods.options import digest
from kvthaw_baselines.index.shadow import ShadowIndex
from kvthaw_baselines.index.snap import SnapIndex
from kvthaw_baselines.index.wave import WaveIndex
from lab.ablated_codes import EachHeadCodesIndex

PAGE = 16
INNER: dict[str, Callable[[IndexContext], Index]] = {
    "exact": ExactIndex,
    "codes": partial(CodesIndex, graded=True, centre=True),
    "quest": partial(BoundIndex, page=16, spread="max"),
    "clusters": partial(ClusterIndex, tokens_per_cluster=10, batch=40, clusters_per_batch=4),
    "tree": partial(TreeIndex, config=TreeConfig(**SETTINGS)),
}
WITH = {name: partial(RemainderIndex, make=make, page=PAGE) for name, make in INNER.items()}
over_all = pytest.mark.parametrize("name", INNER)


def estimated(seqs: Seqs, query: Tensor, rows: Tensor, own: Estimated | None) -> tuple[Tensor, Tensor]:
    """The attention to every token that is not among rows as to its page's mean key and value. Values are the keys. own: scores in
    place of mean keys."""
    batch, q_heads, dim = query.shape
    group = q_heads // rows.shape[1]
    out, lse = torch.zeros(batch, q_heads, dim).double(), torch.full((batch, q_heads), -torch.inf).double()
    for seq in range(batch):
        held = seqs.keys[seq][:, FIRST : seqs.length[seq]].double()
        for head in range(q_heads):
            taken, tokens = set(rows[seq, head // group].tolist()), held.shape[1]
            left = [t for t in range(tokens) if t + FIRST not in taken]
            if left:
                pages = torch.stack([part.mean(dim=0) for part in held[head // group].split(PAGE)])
                each = pages[[t // PAGE for t in left]]
                logits = each @ query[seq, head].double() * seqs.context.scale
                if own is not None:
                    assert own.centre is not None
                    more = own.centre[seq, head // group].double() @ query[seq, head].double()
                    scores = own.scores[seq, head // group, head % group].double() + more
                    known = {int(own.places[seq, head // group, i]): scores[i] for i in range(int(own.wanted[seq]))}
                    assert known.keys() >= {t - FIRST for t in taken if t >= 0}
                    for i, t in enumerate(left):
                        logits[i] = known[t] * seqs.context.scale if t in known else logits[i]
                lse[seq, head], out[seq, head] = logits.logsumexp(0), logits.softmax(0) @ each
    return out, lse


def check(seqs: Seqs, budget: int = 20, step: int = 100) -> Selection:
    query = seqs.query(step)
    found = seqs.index.select(query, budget)
    assert isinstance(seqs.index, RemainderIndex)
    out, lse = estimated(seqs, query, found.rows, seqs.index.inner.select(query, budget).estimated)
    assert found.partial is not None
    found.partial.wait()
    torch.testing.assert_close(found.partial.lse.double(), lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.partial.out.double(), out, rtol=1e-4, atol=1e-4)
    return found


@over_all
def test_the_rows_are_those_of_the_index_alone(name: str) -> None:
    with_rest, alone = Seqs(WITH[name], [150, 63, 0]), Seqs(INNER[name], [150, 63, 0])
    for step, n in enumerate((16, 1, 40, 300)):
        found, bare = check(with_rest, 30, step), alone.index.select(alone.query(step), 30)
        assert torch.equal(found.rows, bare.rows)
        assert torch.equal(found.counts, bare.counts)
        with_rest.append(n)
        alone.append(n)


@over_all
def test_all_rows_selected_leave_nothing(name: str) -> None:
    found = check(Seqs(WITH[name], [30, 9, 0]), 40)
    assert found.partial is not None
    found.partial.wait()
    assert found.partial.lse.eq(-torch.inf).all()


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 30), st.sampled_from([(0,), (1,), (1, 0), (0, 1, 2)])),
        st.tuples(st.just("truncate"), st.integers(0, 2), st.integers(0, 200)),
        st.tuples(st.just("undo"), st.integers(1, 30), st.sampled_from([(0,), (1, 2)])),
        st.tuples(st.just("reorder"), st.sampled_from([(2, 0, 1), (1, 1, 0), (0, 2, 2)]), st.none()),
        st.tuples(st.just("swap"), st.integers(0, 2), st.none()),
        st.tuples(st.just("clone"), st.none(), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(name=st.sampled_from(["exact", "codes", "tree"]), moves=MOVES)
def test_means_and_counts_are_exact_after_any_moves(name: str, moves: list[tuple[str, object, object]]) -> None:
    seqs = Seqs(WITH[name], [70, 33, 0], dim=16, more=300)
    for move in moves:
        match move:
            case ("append", int(n), tuple(which)):
                seqs.append(n, which)
            case ("truncate", int(seq), int(back)):
                length = max(FIRST, seqs.length[seq] - back)
                seqs.truncate(seq, length if length > FIRST else 0)
                seqs.length[seq] = length
                seqs.put(seq, length)
            case ("undo", int(n), tuple(which)):
                before = check(seqs)
                seqs.append(n, which)
                for seq in which:
                    assert isinstance(seqs.index, RemainderIndex)
                    seqs.length[seq] -= n
                    seqs.index.undo(seq, seqs.length[seq])
                    seqs.store.truncate(seq, seqs.length[seq])
                after = check(seqs)
                assert before.partial is not None
                assert after.partial is not None
                after.partial.wait()
                if seqs.index.reversible:
                    assert torch.equal(before.partial.out, after.partial.out)
            case ("reorder", tuple(which), None):
                for of in ("keys", "length", "queries"):
                    setattr(seqs, of, [getattr(seqs, of)[seq] for seq in which])
                seqs.index.reorder(which)
                seqs.store.reorder(which)
            case ("swap", int(seq), None):
                assert isinstance(seqs.index, RemainderIndex)
                held = seqs.index.export(seq)
                seqs.index.truncate(seq, 0)
                seqs.index.load(seq, held, seqs.length[seq])
            case ("clone", None, None):
                index = WITH[name](seqs.context)
                assert isinstance(index, RemainderIndex)
                assert isinstance(seqs.index, RemainderIndex)
                index.clone_from(seqs.index)
                seqs.index.truncate(0, 0)
                seqs.index = index
        check(seqs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(SnapIndex, agree="mean"), "SnapIndex selects the rows"),
        (ShadowIndex, "ShadowIndex selects the rows"),
        (WaveIndex, "WaveIndex selects the rows"),
        (partial(CodesIndex, dense_below=8), "CodesIndex selects the rows"),
    ],
)
def test_an_index_that_cannot_have_a_remainder_is_refused(make: Callable[[IndexContext], Index], says: str) -> None:
    context = Seqs(ExactIndex, [5]).context
    with pytest.raises(ConfigError, match=f"remainder is 16 and {says}"):
        RemainderIndex(context, make=make, page=16)


@pytest.mark.parametrize("end", [150, 149, 96, 30])
def test_a_snapshot_of_an_index_on_the_host_has_its_means(end: int) -> None:
    seqs = Seqs(WITH["tree"], [150, 63, 0])
    assert isinstance(seqs.index, RemainderIndex)
    assert seqs.index.traits.snapshots
    state = seqs.index.state(seqs.index.export(0))
    for kept in (seqs.index.export(0), {name: tensor.clone() for name, tensor in state.items()}):
        other = Seqs(WITH["tree"], [150, 63, 0], build=False)
        other.index.load(0, kept, FIRST + end)
        other.store.truncate(0, FIRST + end)
        other.length[0] = FIRST + end
        other.index.build(1, FIRST, seqs.keys[1][:, FIRST : FIRST + 63], seqs.keys[1][:, FIRST : FIRST + 63], seqs.queries[1])
        check(other)
        other.append(20, [0])
        check(other)


def test_an_index_on_the_host_of_a_gpu_is_refused() -> None:
    context = replace(Seqs(ExactIndex, [5]).context, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="TreeIndex selects the rows on the host of cuda; it must be 0 there"):
        RemainderIndex(context, make=INNER["tree"], page=16)


def test_heads_that_choose_for_themselves_are_refused() -> None:
    seqs = Seqs(partial(RemainderIndex, make=EachHeadCodesIndex, page=16), [50])
    with pytest.raises(ConfigError, match="remainder is 16; it must be 0 where each query head"):
        seqs.index.select(seqs.query(), 20)


@pytest.mark.parametrize("name", ["streaming", "full", "omnikv", "infinigen"])
def test_a_method_that_cannot_have_a_remainder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="remainder is 32"):
        resolve(name, remainder=32)
    assert digest(resolve(name, remainder=0)) == digest(METHODS[name]())


def test_a_page_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="remainder is -1; it must be at least 0"):
        resolve("oracle:remainder=-1")
    with pytest.raises(ConfigError, match="remainder is 'x'; it must be a whole number"):
        resolve("oracle:remainder=x")
    with pytest.raises(ConfigError, match="remainder is 24; it must be a multiple of 16"):
        resolve("thaw:remainder=24")
