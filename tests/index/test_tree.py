"""The C++ trees against the plain definition: the same trees, and the same rows."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dci_tree import DciTree, check_trees, snapshots, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.ranks import Ranks
from kvthaw.errors import CacheError, ConfigError
from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.icecache import PRESETS
from kvthaw.methods.icecache_digest import SETTINGS
from kvthaw.native import DTYPES, Isa, isas
from kvthaw.regions import Regions
from levels import draw_level

# Many levels at few points, and searches that leave points out.
BUSY = TreeConfig(
    promote=0.2, promote_higher=0.3, query_retrieve_share=0.8, insert_beam=20, insert_retrieve_share=0.6, retrieve_batch=1
)
PAPER, CODE, DIGEST = TreeConfig(), TreeConfig(**PRESETS["code"]), TreeConfig(**SETTINGS)
PAGES = dataclasses.replace(DIGEST, unit="page")


def random_keys(heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(heads, n, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def clustered(n: int, dim: int, seed: int = 0, clusters: int = 40) -> tuple[Tensor, Tensor]:
    """[n, dim] keys around centres, each turned a little by its position as RoPE would, and 20 queries near keys."""
    g = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(clusters, dim, generator=g)
    keys = centres[torch.randint(clusters, (n,), generator=g)] + 0.6 * torch.randn(n, dim, generator=g)
    angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2)) * 1e-3
    a, b = keys[:, : dim // 2], keys[:, dim // 2 :]
    keys = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)
    queries = keys[torch.randint(n, (20,), generator=g)] + 0.8 * torch.randn(20, dim, generator=g)
    return keys, queries


def make_index(
    keys: Sequence[Tensor],
    q_heads: int,
    config: TreeConfig,
    *,
    first: int = 0,
    layer: int = 3,
    isa: Isa | None = None,
    threads: int = 2,
    ranks: Ranks | None = None,
) -> TreeIndex:
    """An index over sequences of keys [H, T, D] that the store holds; nothing is built."""
    heads, _, dim = keys[0].shape
    store = HostStore(len(keys), heads, dim, keys[0].dtype, block_size=32)
    for seq, own in enumerate(keys):
        store.append(seq, torch.stack([own, own.flip(1)], 2))
    shape = IndexContext(layer, q_heads, heads, dim, keys[0].dtype, torch.device("cpu"), store, Regions(4, 16, 16), scale=0.2)
    return TreeIndex(dataclasses.replace(shape, ranks=ranks or Ranks()), config, threads=threads, isa=isa)


def defined(index: TreeIndex, head: int, first: int = 0) -> DciTree:
    return DciTree(index.context.head_dim, index.config, first=first, layer=index.context.layer, head=head, scale=0.2)


def same_tree(mine: DciTree, theirs: DciTree) -> None:
    a, b = mine.state(), theirs.state()
    for name in ("first", "level", "parent", "page_node", "page_count", "members"):
        assert torch.equal(a[name], b[name]), name
    assert torch.allclose(a["radius2"], b["radius2"], rtol=1e-6)


def selected(index: TreeIndex, query: Tensor, budget: int, seq: int = 0) -> list[list[int]]:
    found = index.select(query, budget)
    rows, counts = found.rows, found.counts
    for row, count in zip(rows.flatten(0, 1), counts.flatten(), strict=True):
        assert (row[:count] >= 0).all()
        assert (row[count:] == -1).all()
        assert len(set(row[:count].tolist())) == int(count) <= budget
    return [rows[seq, h, : counts[seq, h]].tolist() for h in range(rows.shape[1])]


CONFIGS = [
    *((PAPER, torch.float32), (PAPER, torch.bfloat16), (CODE, torch.float16)),
    *((DIGEST, torch.bfloat16), (PAGES, torch.bfloat16)),
]


@pytest.mark.parametrize("n", [0, 1, 16, 17, 150])
@pytest.mark.parametrize(("config", "dtype"), CONFIGS)
def test_building_and_selecting_equal_the_definition(n: int, config: TreeConfig, dtype: torch.dtype) -> None:
    keys = random_keys(2, n + 5, 64, dtype, seed=n)
    index = make_index([keys], 8, config)
    index.build(0, 5, keys[:, 5:])
    check_trees(index, nearest=config.build_beam == 0)
    query = random_keys(1, 8, 64, seed=n + 1)
    rows = {budget: selected(index, query, budget) for budget in (0, 1, 7, 40, 200)}
    for head in range(2):
        tree = defined(index, head, first=5)
        tree.build(keys[head, 5:])
        same_tree(tree_of(index, 0, head), tree)
        for budget, got in rows.items():
            assert sorted(got[head]) == sorted(tree.select(query[0, 4 * head : 4 * head + 4], budget))


@pytest.mark.parametrize("config", [PAPER, PAGES, DIGEST])
def test_the_union_of_what_each_head_finds_is_not_cut(config: TreeConfig) -> None:
    """Every head of 4 has a quarter of the budget, and a sequence that the budget holds is selected whole."""
    keys = random_keys(2, 150, 64)
    index = make_index([keys, keys[:, :30]], 8, dataclasses.replace(config, merge="each"))
    index.build(0, 0, keys)
    index.build(1, 0, keys[:, :30])
    query = random_keys(2, 8, 64, seed=9)
    for budget in (1, 40, 96):
        got = selected(index, query, budget)
        for head in range(2):
            tree = defined(index, head)
            tree.build(keys[head])
            own = [set(tree.select(query[0, 4 * head + g : 4 * head + g + 1], max(1, budget // 4))) for g in range(4)]
            assert got[head] == sorted(set.union(*own))[:budget]
    assert selected(index, query, 40, seq=1) == [list(range(30))] * 2
    assert index.select(query, 0).counts.tolist() == [[0, 0], [0, 0]]


BUILT: dict[int, DciTree] = {}
"""Of each head_dim: how a tree is searched makes no difference to how it is built."""


WAYS = itertools.product([1, 4, 8], ["union", "share"], ["page", "token"])


@pytest.mark.parametrize(("dim", "way"), list(zip(itertools.cycle([64, 80, 96, 128, 256]), WAYS, strict=False)))
def test_groups_and_policies_equal_the_definition(dim: int, way: tuple[int, str, str]) -> None:
    group, merge, unit = way
    keys = random_keys(1, 300, dim, torch.bfloat16, seed=dim)
    config = dataclasses.replace(BUSY, merge=merge, unit=unit, query_beam=6)
    index = make_index([keys], group, config)
    index.build(0, 0, keys)
    if dim not in BUILT:
        BUILT[dim] = defined(index, 0)
        BUILT[dim].build(keys[0])
    tree = copy.copy(BUILT[dim])
    tree.config = config
    query = random_keys(1, group, dim, seed=dim + group)
    for budget in (20, 75):
        assert selected(index, query, budget)[0] == tree.select(query[0], budget)


@pytest.mark.parametrize("unit", ["page", "token"])
def test_the_best_of_each_node_equal_the_definition(unit: str) -> None:
    """Nodes of some 30 members, of which 4 are answers; algorithm 4's own answer is a part of all that was measured."""
    keys = random_keys(1, 600, 64, seed=4)
    config = dataclasses.replace(PAPER, answers="best", unit=unit, promote=0.03, query_beam=4, retrieve_batch=1)
    index, every = (make_index([keys], 2, one) for one in (config, dataclasses.replace(config, answers="measured")))
    tree = defined(index, 0)
    tree.build(keys[0])
    for built in (index, every):
        built.build(0, 0, keys)
    same = []
    for seed in range(3):
        query = random_keys(1, 2, 64, seed=seed)
        for budget in (20, 120):
            best = selected(index, query, budget)[0]
            assert best == tree.select(query[0], budget)
            same.append(best == selected(every, query, budget)[0])
    assert not all(same)


DESCENTS = [("node", 2, 2.0), ("level", 2, 2.0), ("digest", 0, 2.0), ("digest", 1, 0.0), ("digest", 5, 3.0)]


@pytest.mark.parametrize(("descent", "dtype"), list(zip(DESCENTS, itertools.cycle(DTYPES), strict=False)))
def test_ways_to_descend_equal_the_definition(descent: tuple[str, int, float], dtype: torch.dtype) -> None:
    descend, outliers, spread = descent
    config = dataclasses.replace(BUSY, descend=descend, outliers=outliers, spread=spread, query_beam=5)
    keys = random_keys(1, 300, 64, dtype, seed=21)
    index = make_index([keys], 2, config)
    index.build(0, 0, keys[:, :220])
    index.append([0], keys[None, :, 220:])
    check_trees(index)
    tree = defined(index, 0)
    tree.build(keys[0, :220])
    tree.append(keys[0, 220:])
    query = random_keys(1, 2, 64, seed=22)
    for budget in (8, 40):
        assert sorted(selected(index, query, budget)[0]) == sorted(tree.select(query[0], budget))


def test_an_outlier_among_many_is_found() -> None:
    """One key that the query wants, under a parent that is nothing like it: its node's digest knows of it."""
    keys, _ = clustered(4000, 64)
    query = random_keys(1, 1, 64, seed=5)[0, 0]
    found = {}
    for descend in ("digest", "level"):
        config = dataclasses.replace(DIGEST, descend=descend, query_beam=16, query_beam_share=0.0)
        index = make_index([keys[None]], 1, config)
        hits = 0
        for place in range(20, 4000, 200):
            odd = keys.clone()
            odd[place] += 25.0 * query / query.norm()
            index.context.store.truncate(0, 0)
            index.context.store.append(0, torch.stack([odd, odd], 1)[None])
            index.build(0, 0, odd[None])
            hits += place in selected(index, query[None, None], 16)[0]
        found[descend] = hits
    assert found["digest"] == 20
    assert found["level"] < 20


@pytest.mark.parametrize(("composites", "simples"), [(1, 3), (2, 1), (2, 2)])
def test_more_indices_equal_the_definition(composites: int, simples: int) -> None:
    config = dataclasses.replace(
        BUSY, composites=composites, simples=simples, query_retrieve_share=0.4, insert_retrieve_share=0.7
    )
    keys = random_keys(1, 240, 64, seed=1)
    index = make_index([keys], 2, config)
    index.build(0, 0, keys[:, :180])
    index.append([0], keys[None, :, 180:])
    check_trees(index)
    tree = defined(index, 0)
    tree.build(keys[0, :180])
    tree.append(keys[0, 180:])
    same_tree(tree_of(index, 0, 0), tree)
    query = random_keys(1, 2, 64, seed=2)
    assert selected(index, query, 60)[0] == tree.select(query[0], 60)


def test_ever_longer_keys_lay_the_tree_out_again_a_few_times_only() -> None:
    """Which takes as long as a step; a longest key by a little comes every other token at first."""
    keys = random_keys(1, 300, 64, seed=3) * torch.linspace(0.5, 2.0, 300)[:, None]  # |k|^2 grows 16 times
    index = make_index([keys], 1, BUSY)
    index.build(0, 0, keys[:, :20])
    radii = []
    for at in range(20, 300):
        index.append([0], keys[None, :, at : at + 1])
        radii.append(tree_of(index, 0, 0).radius2)
    assert radii[-1] >= float(keys.double().square().sum(dim=2).max())
    assert 5 <= len(set(radii)) <= 15


@pytest.mark.parametrize(("built", "dtype"), list(zip([0, 1, 60, 120], DTYPES, strict=True)))
def test_inserting_and_truncating_equal_the_definition(built: int, dtype: torch.dtype) -> None:
    keys = random_keys(2, 240, 96, dtype, seed=built) * torch.linspace(0.8, 1.3, 240)[:, None]  # c grows all the way
    keys = keys.to(dtype)
    index = make_index([keys], 2, BUSY)
    index.build(0, 0, keys[:, :built])
    trees = [defined(index, head) for head in range(2)]
    for head, tree in enumerate(trees):
        tree.build(keys[head, :built])
    at = built
    for size in (1, 16, 33):
        index.append([0], keys[None, :, at : at + size])
        for head, tree in enumerate(trees):
            tree.append(keys[head, at : at + size])
            same_tree(tree_of(index, 0, head), tree)
        at += size
    check_trees(index)
    for length in (at - 3, at // 2, 1):
        index.truncate(0, length)
        index.append([0], keys[None, :, length : length + 20])
        check_trees(index)
        for head, tree in enumerate(trees):
            tree.truncate(length)
            tree.append(keys[head, length : length + 20])
            same_tree(tree_of(index, 0, head), tree)


def test_one_append_equals_several() -> None:
    keys = random_keys(2, 300, 64, seed=4)
    one, many = (make_index([keys], 2, BUSY) for _ in range(2))
    for index in (one, many):
        index.build(0, 0, keys[:, :100])
    one.append([0], keys[None, :, 100:])
    for at in range(100, 300, 25):
        many.append([0], keys[None, :, at : at + 25])
    for head in range(2):
        same_tree(tree_of(one, 0, head), tree_of(many, 0, head))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_instruction_set_makes_the_same_tree(isa: Isa, dtype: torch.dtype) -> None:
    keys = random_keys(1, 900, 80, dtype, seed=8)
    plain, index = (make_index([keys], 4, BUSY, isa=one) for one in ("scalar", isa))
    for one in (plain, index):
        one.build(0, 0, keys[:, :800])
        one.append([0], keys[None, :, 800:])
    same_tree(tree_of(index, 0, 0), tree_of(plain, 0, 0))
    check_trees(index)
    query = random_keys(1, 4, 80, seed=9)
    assert selected(index, query, 100) == selected(plain, query, 100)


def test_the_heads_of_one_process_have_the_trees_that_they_have_among_all() -> None:
    keys = random_keys(4, 600, 64, seed=5)
    alone, part = make_index([keys], 4, BUSY), make_index([keys[2:]], 2, BUSY, ranks=Ranks(1, 2, splits_heads=True))
    for index, own in ((alone, keys), (part, keys[2:])):
        index.build(0, 0, own[:, :500])
        index.append([0], own[None, :, 500:])
    for mine, theirs in zip(snapshots(part, 0), snapshots(alone, 0)[2:], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_threads_change_nothing() -> None:
    keys = random_keys(3, 1500, 64, seed=5)
    states = []
    for threads in (1, 2, 5):
        index = make_index([keys], 6, BUSY, threads=threads)
        index.build(0, 0, keys[:, :1400])
        index.append([0], keys[None, :, 1400:])
        states.append((snapshots(index, 0), selected(index, random_keys(1, 6, 64, seed=6), 90)))
    for state, rows in states[1:]:
        assert rows == states[0][1]
        for mine, theirs in zip(state, states[0][0], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("group", "options"), [(2, {}), (3, {"query_retrieve_share": 0.6}), (5, {"unit": "token"}), (8, {})])
def test_query_heads_together_choose_as_each_alone(isa: Isa, group: int, options: dict[str, Any]) -> None:
    """On few threads the heads of a tree are searched together, by digests; on as many as there are heads each alone."""
    config = dataclasses.replace(DIGEST, query_beam=20, promote=0.1, retrieve_batch=1, **options)
    keys, query = random_keys(2, 1500, 80, torch.bfloat16, seed=5), random_keys(2, 2 * group, 80, seed=6)
    query[1, 1] = query[1, 0] + 0.1 * query[1, 1]  # which descends to much the same nodes
    chosen = []
    for threads in (1, 3, 2 * group):
        index = make_index([keys], 2 * group, config, isa=isa, threads=threads)
        index.build(0, 0, keys[:, :1400])
        index.append([0], keys[None, :, 1400:])
        chosen.append([selected(index, one[None], budget) for one in query for budget in (20, 90)])
    assert chosen[0] == chosen[1] == chosen[2]


def test_earlier_searches_which_order_the_next_change_nothing() -> None:
    keys = random_keys(4, 1500, 64, seed=5) * torch.tensor([1, 9, 0.1, 3])[:, None, None]
    asked, fresh = (make_index([keys], 8, BUSY, threads=3) for _ in range(2))
    for index in (asked, fresh):
        index.build(0, 0, keys)
    for seed in (1, 2):
        selected(asked, random_keys(1, 8, 64, seed=seed), 90)
    query = random_keys(1, 8, 64, seed=6)
    assert selected(asked, query, 90) == selected(fresh, query, 90)


def test_ragged_sequences_equal_sequences_alone() -> None:
    seqs = [random_keys(2, n, 64, seed=n) for n in (700, 0, 33, 220)]
    index = make_index(seqs, 4, TreeConfig())
    for seq, keys in enumerate(seqs):
        index.build(seq, min(4, keys.shape[1]), keys[:, 4:])
    check_trees(index)
    query = random_keys(4, 4, 64, seed=3)
    deferred = [selected(index, query, 48, seq) for seq in range(4)]
    assert deferred[1] == [[], []]
    for seq, keys in enumerate(seqs):
        alone = make_index([keys], 4, TreeConfig())
        alone.build(0, min(4, keys.shape[1]), keys[:, 4:])
        assert selected(alone, query[seq : seq + 1], 48)[0] == deferred[seq][0]
        assert selected(alone, query[seq : seq + 1], 48) == deferred[seq]


def test_a_budget_for_all_returns_all_and_never_built_sequences_return_none() -> None:
    keys = [random_keys(2, 100, 64), random_keys(2, 100, 64)]
    index = make_index(keys, 2, TreeConfig())
    index.build(0, 3, keys[0][:, 3:])
    query = random_keys(2, 2, 64)
    assert selected(index, query, 97) == [list(range(3, 100))] * 2
    assert selected(index, query, 97, seq=1) == [[], []]


def test_the_budget_is_filled() -> None:
    keys, queries = clustered(3000, 64)
    index = make_index([keys[None]], 4, TreeConfig())
    index.build(0, 0, keys[None])
    for budget in (1, 10, 36, 72, 176, 400):
        assert len(selected(index, queries[None, :4], budget)[0]) == budget


@pytest.mark.parametrize(
    ("config", "unit", "budget", "least"),
    [(DIGEST, "page", 36, 0.8), (DIGEST, "page", 72, 0.93), (DIGEST, "page", 176, 0.98), (DIGEST, "token", 36, 0.98),
     (DIGEST, "token", 176, 0.99), (PAPER, "token", 72, 0.85), (PAPER, "token", 176, 0.85), (CODE, "page", 176, 0.9)],
)  # fmt: skip
@pytest.mark.parametrize("built", [6000, 1000])
def test_what_matters_is_found(config: TreeConfig, unit: str, budget: int, least: float, built: int) -> None:
    keys, queries = clustered(6000, 64)
    index = make_index([keys[None]], 1, dataclasses.replace(config, unit=unit))
    index.build(0, 0, keys[None, :built])
    index.append([0], keys[None, None, built:])
    found, best = 0.0, 0.0
    for query in queries:
        mass = (keys @ query / 8).softmax(0)
        found += float(mass[selected(index, query[None, None], budget)[0]].sum())
        best += float(mass.topk(budget).values.sum())
    assert found >= least * best, f"{found / best:.3f} of the attention that {budget} rows can cover"


def test_prioritized_dci_spares_true_products() -> None:
    """Of every node that it visits, a search takes the inner products of the share asked for alone, in whole batches."""
    keys, queries = clustered(6000, 64)

    def products(**options: object) -> int:
        index = make_index([keys[None]], 1, dataclasses.replace(PAPER, promote=0.01, query_beam=300, **options))  # type: ignore[arg-type]
        index.build(0, 0, keys[None])
        for query in queries:
            index.select(query[None, None], 36)
        return index.forest.products()

    every = len(queries) * len(keys)
    assert products(query_retrieve_share=1.0) == every
    assert 0.85 * every < products(query_retrieve_share=0.8, retrieve_batch=16) < 0.95 * every
    assert products(query_retrieve_share=0.8, retrieve_batch=1) < 0.82 * every


def test_building_takes_time_in_proportion_to_the_keys() -> None:
    """Parents are found by descending the tree: no key meets all those of the level above."""
    keys, _ = clustered(8000, 64)
    index = make_index([keys[None]], 1, PAPER)
    index.build(0, 0, keys[None])
    found = tree_of(index, 0, 0)
    present = found.levels()
    nearest = sum(
        found.closeness(i, [found.parent[i]])[0] >= max(found.closeness(i, found.at_level(present[-2])))
        for i in range(0, 8000, 20)
        if found.level[i] == 1
    )
    assert 150 < nearest < 400, "most of the parents are the nearest, though not all were compared with"


def test_sequences_share_trees_until_one_changes() -> None:
    keys = random_keys(2, 400, 64, seed=7)
    index = make_index([keys[:, :300], keys[:, :1]], 2, BUSY)
    index.build(0, 0, keys[:, :300])
    alone = index.nbytes()
    index.context.store.reorder([0, 0, 0])
    index.reorder([0, 0, 0])
    assert index.nbytes() == alone
    index.context.store.append(1, torch.stack([keys[:, 300:], keys[:, 300:]], 2))
    index.append([1], keys[None, :, 300:])
    index.truncate(2, 150)
    index.context.store.truncate(2, 150)
    check_trees(index)
    assert [index.length(seq) for seq in range(3)] == [300, 400, 150]
    tree = defined(index, 1)
    tree.build(keys[1, :300])
    same_tree(tree_of(index, 0, 1), tree)
    tree.append(keys[1, 300:])
    same_tree(tree_of(index, 1, 1), tree)


def test_a_sequence_may_begin_with_append() -> None:
    keys = random_keys(1, 60, 64, seed=2)
    begun, built = (make_index([keys], 1, BUSY) for _ in range(2))
    begun.append([0], keys[None, :, 4:])  # regions.sink is 4
    built.build(0, 4, keys[:, :0])
    built.append([0], keys[None, :, 4:])
    same_tree(tree_of(begun, 0, 0), tree_of(built, 0, 0))


def test_a_clone_goes_its_own_way() -> None:
    keys = random_keys(2, 300, 64, seed=3)
    index, twin = (make_index([keys], 2, BUSY) for _ in range(2))
    index.build(0, 0, keys[:, :200])
    twin.clone_from(index)
    before = snapshots(index, 0)
    twin.append([0], keys[None, :, 200:])
    for mine, theirs in zip(snapshots(index, 0), before, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    query = random_keys(1, 2, 64, seed=4)
    index.append([0], keys[None, :, 200:])
    want = selected(index, query, 50)
    del index
    check_trees(twin)
    assert selected(twin, query, 50) == want


def test_a_clone_is_exact() -> None:
    keys = random_keys(2, 500, 64, seed=10)
    index, other = (make_index([keys, keys], 4, BUSY) for _ in range(2))
    index.build(0, 4, keys[:, 4:300])
    index.append([0], keys[None, :, 300:400])
    other.build(1, 4, keys[:, 4:50])  # which the other does not have
    other.clone_from(index)
    check_trees(other)
    query = random_keys(2, 4, 64, seed=11)
    for budget in (30, 90):
        assert selected(other, query, budget) == selected(index, query, budget)
    for one in (index, other):
        one.append([0], keys[None, :, 400:])
        one.truncate(0, 350)
    for mine, theirs in zip(snapshots(index, 0), snapshots(other, 0), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_key_is_named_and_changes_nothing(bad: float) -> None:
    keys = random_keys(2, 300, 64, seed=12)
    keys[1, 250, 3] = bad
    index = make_index([keys], 2, BUSY)
    with pytest.raises(ValueError, match="layer 3, KV head 1: the key at position 250 is not finite"):
        index.build(0, 10, keys[:, 10:])
    index.build(0, 0, keys[:, :200])
    before = snapshots(index, 0)
    with pytest.raises(ValueError, match="layer 3, KV head 1: the key at position 250 is not finite"):
        index.append([0], keys[None, :, 200:])
    check_trees(index)
    for mine, theirs in zip(snapshots(index, 0), before, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(ValueError, match="position 250 is not finite"):
        defined(index, 0).build(keys[1])
    query = random_keys(1, 2, 64)
    query[0, 1, 0] = bad
    with pytest.raises(ValueError, match="KV head 1: a query is not finite"):
        index.select(query, 8)


def test_misuse_is_refused() -> None:
    keys = random_keys(1, 50, 64)
    index = make_index([keys, keys], 1, TreeConfig())
    with pytest.raises(CacheError, match="store holds 50 rows"):
        index.build(0, 0, torch.zeros(1, 60, 64))
    with pytest.raises(CacheError, match="store holds 50 rows"):
        index.append([1], keys[None])
    index.build(0, 0, keys)
    with pytest.raises(CacheError, match="twice"):
        index.append([0, 0], keys[None])
    with pytest.raises(ConfigError, match="budget is -1"):
        index.select(keys[:, :1], -1)
    with pytest.raises(ValueError, match="query is"):
        index.select(keys[:, :2], 8)
    with pytest.raises(ValueError, match="isa is 'mmx'"):
        make_index([keys], 1, TreeConfig(), isa="mmx")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("promote", 0.0), ("promote_higher", 0.9), ("page_size", 0), ("composites", 17), ("query_beam", 0), ("promotion", "none"),
     ("insert_retrieve_share", 1.5), ("build_beam", -1), ("retrieve_batch", 0), ("merge", "max"), ("answers", "all"), ("seed", -1)],
)  # fmt: skip
def test_settings_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {value!r}; it must be"):
        TreeConfig(**{field: value})  # type: ignore[arg-type]


def test_answers_of_each_node_go_with_descending_by_nodes() -> None:
    with pytest.raises(ConfigError, match="answers is 'best' and descend is 'digest'; it must be 'node'"):
        dataclasses.replace(DIGEST, answers="best")


def test_levels_are_drawn_as_configured() -> None:
    config = TreeConfig(promote=0.1, promote_higher=0.5)
    levels = [draw_level(config, 2, 1, position) for position in range(20000)]
    assert abs(sum(level >= 2 for level in levels) / 20000 - 0.1) < 0.01
    assert abs(sum(level >= 3 for level in levels) / 20000 - 0.05) < 0.01
    assert levels[:500] != [draw_level(config, 2, 0, position) for position in range(500)]
    one = TreeConfig(promote=0.1)
    assert draw_level(one, 2, 1, 5) == draw_level(dataclasses.replace(one, promote_higher=0.1), 2, 1, 5), (
        "one ratio for all levels"
    )
    order = TreeConfig(promote=0.25, promote_higher=0.5, promotion="in_order")
    assert [draw_level(order, 0, 0, position) for position in range(16)] == [1, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1, 4]


def test_keys_that_are_equal_or_zero() -> None:
    keys = torch.cat([torch.zeros(1, 40, 64), random_keys(1, 1, 64).expand(1, 200, 64), torch.zeros(1, 40, 64)], 1).contiguous()
    index = make_index([keys], 2, BUSY)
    index.build(0, 0, keys[:, :30])
    index.append([0], keys[None, :, 30:])
    check_trees(index)
    assert len(selected(index, torch.zeros(1, 2, 64), 50)[0]) == 50
    index.build(0, 0, keys)
    check_trees(index)
    assert len(selected(index, keys[None, :, 50].expand(1, 2, 64), 50)[0]) == 50


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_history_leaves_trees(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 5, 16]))
    config = TreeConfig(
        promote=data.draw(st.sampled_from([0.05, 0.5])),
        promote_higher=0.4,
        promotion=data.draw(st.sampled_from(["random", "in_order"])),
        descend=data.draw(st.sampled_from(["node", "level", "digest"])),
        build_beam=data.draw(st.sampled_from([0, 1, 5])),
        insert_beam=data.draw(st.sampled_from([1, 20])),
        page_size=page_size,
        simples=data.draw(st.integers(1, 2)),
        seed=data.draw(st.integers(0, 9)),
    )
    first = data.draw(st.integers(0, 3))
    keys = random_keys(2, 150, 16, seed=data.draw(st.integers(0, 99)))
    index = make_index([keys, keys], 4, config)
    for seq in range(2):
        index.build(seq, first, keys[:, first : data.draw(st.integers(first, 80))])
    check_trees(index, nearest=config.build_beam == 0)
    for _ in range(data.draw(st.integers(1, 5))):
        seq = data.draw(st.integers(0, 1))
        end = index.length(seq)
        match data.draw(st.sampled_from(["append", "append", "truncate", "reorder"])):
            case "append":
                index.append([seq], keys[None, :, end : data.draw(st.integers(end, 150))])
            case "truncate":
                index.truncate(seq, data.draw(st.integers(0, end + 1)))
            case _:
                index.reorder([seq, seq])
        check_trees(index)
        budget = data.draw(st.integers(0, 160))
        for seq in range(2):
            for rows in selected(index, keys[:, :4].reshape(2, 4, 16), budget, seq):
                held = range(first, max(first, index.length(seq)))
                assert set(rows) <= set(held)
                assert budget < len(held) or rows == list(held)


def test_two_python_threads_at_once() -> None:
    keys = [random_keys(4, 1200, 64, seed=seed) for seed in range(2)]
    want = []
    for own in keys:
        index = make_index([own], 8, BUSY)
        index.build(0, 0, own)
        want.append(selected(index, random_keys(1, 8, 64), 64))
    got: list[list[list[list[int]]]] = [[], []]

    def work(who: int) -> None:
        for _ in range(8):
            index = make_index([keys[who]], 8, BUSY)
            index.build(0, 0, keys[who])
            got[who].append(selected(index, random_keys(1, 8, 64), 64))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(rows == want[who] for who in range(2) for rows in got[who])
    assert len(got[0]) == len(got[1]) == 8


@pytest.mark.parametrize("config", [PAPER, CODE, DIGEST, BUSY], ids=["paper", "code", "digest", "busy"])
def test_a_saved_tree_answers_and_grows_as_the_one_that_was_saved(config: TreeConfig) -> None:
    """After a history of appends and a truncation, to the bit; of two sequences, with keys of a type that is rounded."""
    keys = [random_keys(2, 700, 32, torch.bfloat16, seed) for seed in (1, 2)]
    one, other = (make_index(keys, 4, config, first=4) for _ in range(2))
    for seq, built in enumerate((400, 60)):
        one.build(seq, 4, keys[seq][:, 4 : 4 + built])
        one.append([seq], keys[seq][None, :, 4 + built : 104 + built])
        one.truncate(seq, 94 + built)
        other.load(seq, one.state(one.export(seq)), 90 + built)
        one.truncate(seq, 90 + built)
    query = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(9))
    for _ in range(3):
        assert torch.equal(one.select(query, 48).rows, other.select(query, 48).rows)
        for seq in (0, 1):
            assert all(
                map(
                    torch.equal, *([each for tree in snapshots(index, seq) for each in tree.values()] for index in (one, other))
                )
            )
        for index in (one, other):
            index.append([0, 1], torch.stack([own[:, :7] for own in keys]))
    check_trees(other)


def test_no_numbers_in_a_saved_tree_do_harm() -> None:
    """Whatever is written over: refused with nothing changed, or a tree that is one."""
    keys = random_keys(2, 300, 16)
    index = make_index([keys], 2, DIGEST, first=4)
    index.build(0, 4, keys[:, 4:250])
    saved = dict(index.state(index.export(0)))
    query, generator, refused = torch.randn(1, 2, 16), random.Random(0), 0
    whole = index.select(query, 32).rows
    for trial in range(150):
        name = generator.choice(list(saved))
        other = saved[name].clone()
        at = generator.randrange(other.numel())
        values = [-(2**31), -2, -1, 0, 1, at, 245, 246, 2**31 - 1, int(other.view(-1)[generator.randrange(other.numel())])]
        other.view(-1)[at] = generator.choice(values if name != "radius2" else [float("nan"), float("inf"), -1.0, 0.0, 1e300])
        try:
            index.load(
                0, {**saved, name: other} if trial % 10 else {**saved, name: other.view(-1)[:-1]}, generator.choice([250, 100])
            )
        except CacheError:
            refused += 1
            assert torch.equal(index.select(query, 32).rows, whole)
            continue
        check_trees(index)
        index.append([0], keys[None, :, :20])
        index.load(0, saved, 250)
    assert refused > 100
