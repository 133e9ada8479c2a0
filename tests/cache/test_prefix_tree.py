"""The tree holds exactly the prefixes that were given and not dropped."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given as random_cases
from hypothesis import settings
from hypothesis import strategies as st

from kvthaw.cache import prefix_kept
from kvthaw.cache.prefix_kept import Node, PrefixTree

SIZE = 4


def given(tree: PrefixTree, ids: list[int], salt: str = "") -> None:
    for node, new in tree.insert(torch.tensor(ids), salt):
        last = node
        assert not new or len(node.tokens) <= SIZE
    for node in tree.covered(last):
        tree.remove(node)


def matched(tree: PrefixTree, ids: list[int], salt: str = "") -> int:
    path, tokens = tree.match(torch.tensor(ids), salt)
    assert sum(len(node.tokens) for node in path[:-1]) + (tokens and 1) <= tokens <= sum(len(node.tokens) for node in path)
    return tokens


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_prefix_is_found(seed: int) -> None:
    """Of random prompts of few tokens, so that they share; of another salt nothing."""
    rng, tree = random.Random(seed), PrefixTree(SIZE)
    held: dict[str, list[list[int]]] = {"": [], "other": []}
    for _ in range(60):
        base = rng.choice(held[""])[: rng.randrange(12)] if held[""] and rng.random() < 0.7 else []
        ids, salt = base + [rng.randrange(2) for _ in range(rng.randrange(1, 12))], rng.choice(["", "", "other"])
        assert matched(tree, ids, salt) == max((common(ids, each) for each in held[salt]), default=0)
        given(tree, ids, salt)
        held[salt].append(ids)
        assert matched(tree, ids, salt) == len(ids)


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PrefixTree(SIZE)
    given(tree, [1] * 8)
    given(tree, [1] * 4 + [2] * 4)
    tree.touch(tree.match(torch.tensor([1] * 8), "")[0][-1])
    tree.pin(tree.match(torch.tensor([1] * 4), "")[0][-1], 1)
    for left in ([1] * 8, [1] * 4):
        tree.remove(next(tree.unpinned()))
        assert matched(tree, [1] * 8) == len(left)
    assert matched(tree, [1] * 4 + [2] * 4) == 4
    assert not list(tree.unpinned())
    assert tree.pinned == 1


def test_what_is_in_use_is_not_covered_by_more_of_the_same_tokens() -> None:
    tree = PrefixTree(SIZE)
    given(tree, [1] * 2)
    (short,), _ = tree.match(torch.tensor([1] * 2), "")
    tree.pin(short, 1)
    given(tree, [1] * 4)
    assert short in tree.nodes
    tree.pin(short, -1)
    (long,), _ = tree.match(torch.tensor([1] * 4), "")
    assert tree.covered(long) == [short]


def test_an_insertion_that_is_given_up_adds_nothing_more() -> None:
    tree = PrefixTree(SIZE)
    for i, _ in enumerate(tree.insert(torch.tensor([1] * 12), "")):
        if i == 2:
            break
    assert matched(tree, [1] * 12) == 8
    assert len(tree.nodes) == 2
    assert tree.pinned == 0


def test_a_salt_whose_only_prefix_is_dropped_meanwhile_is_found() -> None:
    """Memory for a prompt's first block may be had by dropping others, the last one of another salt too."""
    tree = PrefixTree(SIZE)
    given(tree, [1] * 4, "old")
    for at, _ in enumerate(tree.insert(torch.tensor([2] * 8), "new")):
        if at == 0:
            tree.remove(next(tree.unpinned()))
    assert matched(tree, [2] * 8, "new") == 8
    assert matched(tree, [1] * 4, "old") == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@random_cases(
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)), max_size=20),
    asked=st.lists(st.integers(0, 2), min_size=1, max_size=SIZE),
)
def test_children_are_found_as_if_all_were_compared(steps: list[tuple[bool, list[int]]], asked: list[int]) -> None:
    parent, held = Node(None, torch.tensor([])), list[list[int]]()
    for adds, tokens in steps:
        if adds and tokens not in held:
            parent.add(Node(parent, torch.tensor(tokens)))
            held.append(tokens)
        elif held and not adds:
            parent.drop(parent.children[torch.tensor(held.pop(0)).numpy().tobytes()])
    found, same = parent.nearest(torch.tensor(asked))
    assert same == max((common(each, asked) for each in held), default=0)
    assert (found is not None) == (same > 0)
    assert found is None or common(found.tokens.tolist(), asked) == same
    beginnings = [each for each in held if len(each) < len(asked) and asked[: len(each)] == each]
    assert [child.tokens.tolist() for child in parent.beginnings(torch.tensor(asked))] == sorted(
        beginnings, key=len, reverse=True
    )


def test_prompts_are_compared_with_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 different beginnings and as many salts, each of a block and some; the time does not grow with them."""
    tree, compared = PrefixTree(SIZE), list[int]()
    for number in range(3_000):
        given(tree, [number, 1, 2, 3, number], str(number))
        given(tree, [number, 1, 2, 3, number])
    monkeypatch.setattr(prefix_kept, "common", lambda *two: compared.append(1) or common(*(each.tolist() for each in two)))
    assert matched(tree, [2000, 1, 2, 9]) == 3
    assert matched(tree, [2000, 1, 2, 3, 2000, 7]) == 5
    given(tree, [2000, 1, 2])
    given(tree, [3_001, 1, 2, 3])
    for _ in range(4):  # leaves, and what is before them
        tree.remove(next(tree.unpinned()))
    assert len(compared) <= 12


def test_a_long_prompt_is_pinned_in_time_linear_in_its_blocks() -> None:
    tree, ids = PrefixTree(SIZE), torch.arange(SIZE * 20_000)
    assert sum(new for _, new in tree.insert(ids, "")) == 20_000
    assert tree.pinned == 0
