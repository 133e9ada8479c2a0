"""ShadowKV's index against its formulas, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Rotary
from kvthaw.cache.pool import Slab
from kvthaw.errors import ConfigError
from kvthaw_baselines.index.shadow import ShadowIndex
from shapes import DTYPES, TOLERANCE

CHUNK = 4
SMALL = partial(ShadowIndex, chunk=CHUNK, rank=12, outliers=3)


def turn(keys: Tensor, positions: Tensor) -> Tensor:
    """keys [..., T, D] turned by positions [T], channel i with i + D / 2: the formula of rotary positions."""
    half = keys.shape[-1] // 2
    angle = positions[:, None].to(keys.dtype) * 100.0 ** (-torch.arange(half).to(keys.dtype) / half)
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def rotary(dim: int) -> Rotary:
    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        both = (positions[..., None].double() * 100.0 ** (-torch.arange(dim // 2).double() / (dim // 2))).repeat(1, 1, 2)
        return both.cos(), both.sin()

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = k.shape[-1] // 2
        swapped = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
        return q, k * cos[:, None] + swapped * sin[:, None]

    return Rotary(angles, apply)


def made(shape: IndexContext, *, turns: bool, **options: Any) -> ShadowIndex:
    return SMALL(replace(shape, rows=48, rotary=rotary(shape.head_dim) if turns else None), **options)


def low_rank(seqs: Seqs, rank: int, *, turns: bool) -> None:
    """Make the sequences' keys of a low rank over all heads, with a little noise, before they are turned."""
    for seq, keys in enumerate(seqs.keys):
        heads, tokens, dim = keys.shape
        g = torch.Generator().manual_seed(seq)
        flat = torch.randn(tokens, rank, generator=g) @ torch.randn(rank, heads * dim, generator=g) / rank**0.5
        flat += 0.05 * torch.randn(tokens, heads * dim, generator=g)
        new = flat.unflatten(1, (heads, dim)).transpose(0, 1)
        seqs.keys[seq] = (turn(new, torch.arange(tokens)) if turns else new).to(keys.dtype)


def outlying(keys: Tensor, count: int) -> list[int]:
    """Of keys [n, D], the chunks whose worst key has the least cosine with the chunk's mean."""
    worst = []
    for at in range(0, len(keys) - CHUNK + 1, CHUNK):
        mean = keys[at : at + CHUNK].mean(dim=0)
        worst.append(min(float(k @ mean / (k.norm() * mean.norm())) for k in keys[at : at + CHUNK]))
    return sorted(range(len(worst)), key=lambda i: worst[i])[:count]


@pytest.mark.parametrize("turns", [True, False])
def test_rows_are_the_definitions(turns: bool) -> None:
    seqs = Seqs(partial(made, turns=turns), [150, 61], group=3, dim=32)
    for step in range(3):
        query = seqs.query(step)
        rows = seqs.index.select(query, 48).rows
        for seq, length in enumerate(seqs.length):
            for head in range(2):
                keys = seqs.keys[seq][head, FIRST:length].double()
                always = outlying(keys[: [150, 61][seq]], 3)
                chunks = [range(at, min(at + CHUNK, len(keys))) for at in range(0, len(keys), CHUNK)]
                others = [c for i, c in enumerate(chunks) if i not in always]
                means = torch.stack([keys[list(c)].mean(dim=0) for c in others])
                sizes = torch.tensor([len(c) for c in others]).double()
                weights = []
                for q in query[seq, 3 * head : 3 * head + 3].double():
                    weight = torch.exp(means @ q * seqs.context.scale)
                    weights.append(weight / (weight * sizes).sum())
                expected = [i for c in always for i in chunks[c]]
                for c in torch.stack(weights).amax(dim=0).argsort(descending=True).tolist():
                    expected += list(others[c])
                assert set(rows[seq, head].tolist()) == {FIRST + i for i in expected[:48]}
        seqs.append(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", [True, False])
def test_keys_are_those_of_the_best_low_rank(turns: bool, dtype: torch.dtype) -> None:
    """Against the truncated SVD of the keys before their turn, all heads side by side."""
    seqs = Seqs(partial(made, turns=turns), [150, 61], dim=32, dtype=dtype, build=False)
    low_rank(seqs, 12, turns=turns)
    index = seqs.index
    assert isinstance(index, ShadowIndex)
    for seq, prompt in enumerate((150, 61)):
        keys = seqs.keys[seq][:, FIRST : FIRST + prompt]
        index.build(seq, FIRST, keys, keys, seqs.queries[seq][:, :64])
    place = torch.arange(61).expand(2, 2, -1)
    found = index.keys(place)
    for seq, prompt in enumerate((150, 61)):
        positions = torch.arange(FIRST, FIRST + prompt)
        given = seqs.keys[seq][:, FIRST : FIRST + prompt].double()
        before = turn(given, -positions) if turns else given
        u, s, v = torch.linalg.svd(before.transpose(0, 1).flatten(1), full_matrices=False)
        best = (u[:, :12] * s[:12] @ v[:12]).unflatten(1, (2, 32)).transpose(0, 1)
        best = turn(best, positions) if turns else best
        scale = float(given.abs().max())
        assert (found[seq].double() - best[:, :61]).abs().max() < scale * 2 * TOLERANCE[dtype]["atol"]
        assert (best - given).norm() < 0.1 * given.norm(), "of low rank before the turn"
        if turns:
            u, s, v = torch.linalg.svd(given.transpose(0, 1).flatten(1), full_matrices=False)
            assert s[12:].square().sum() > 0.1 * s.square().sum(), "not of low rank after it"


def test_a_layer_that_does_not_turn_is_not_turned_back() -> None:
    seqs = Seqs(partial(made, turns=True), [150], dim=32, build=False)
    low_rank(seqs, 12, turns=False)
    keys = seqs.keys[0][:, FIRST:154]
    seqs.index.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])
    assert isinstance(seqs.index, ShadowIndex)
    assert not seqs.index.turned[0]
    found = seqs.index.keys(torch.arange(150).expand(1, 2, -1))
    assert (found[0] - keys).norm() < 0.1 * keys.norm()


def test_rebuilt_keys_stand_where_rows_came() -> None:
    """Not where nothing came, nor for outliers, nor for tokens after the prompt, nor where every row comes."""
    seqs = Seqs(partial(made, turns=True), [100, 20], dim=32)
    seqs.append(8)
    index = seqs.index
    assert isinstance(index, ShadowIndex)
    slab = Slab(2, 2, 32, seqs.context.regions, 48, dtype=torch.float32, device=torch.device("cpu"))
    slab.data.fill_(7.0)
    fetch = torch.full((2, 2, 48), -1, dtype=torch.int32)
    fetch[:, :, 3:19] = torch.arange(FIRST, FIRST + 16)
    fetch[0, :, 30:34] = torch.arange(FIRST + 102, FIRST + 106)  # after the prompt
    slots = torch.stack([torch.randperm(48) for _ in range(4)]).view(2, 2, 48).int()
    slots = torch.where(fetch >= 0, slots, -1)
    index.rebuild(slab, fetch, slots)
    assert (slab.values == 7).all()
    assert (slab.keys[:, :, : slab.pool_start] == 7).all()
    expected = torch.full_like(slab.keys[:, :, slab.pool_start :], 7.0)
    made_keys = index.keys((fetch - FIRST).clamp(min=0, max=99).long())
    for head in range(2):
        always = outlying(seqs.keys[0][head, FIRST : FIRST + 100].double(), 3)
        for m in range(3, 19):
            if (int(fetch[0, head, m]) - FIRST) // CHUNK not in always:
                expected[0, head, int(slots[0, head, m])] = made_keys[0, head, m]
    torch.testing.assert_close(slab.keys[:, :, slab.pool_start :], expected)


def test_clone_and_order_of_sequences_are_kept() -> None:
    seqs = Seqs(partial(made, turns=True), [100, 40], dim=32)
    other = made(seqs.context, turns=True)
    assert isinstance(seqs.index, ShadowIndex)
    other.clone_from(seqs.index)
    for index in (other, seqs.index):
        index.reorder([1, 0, 1])
        index.truncate(0, FIRST + 30)
    place = torch.arange(30).expand(3, 2, -1)
    assert torch.equal(other.keys(place), seqs.index.keys(place))
    assert seqs.index.known.tolist() == [30, 100, 40]
    assert seqs.index.total.tolist() == [30, 100, 40]


@pytest.mark.parametrize("name", ["chunk", "rank", "outliers"])
def test_settings_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        Seqs(partial(ShadowIndex, **{name: -1}), [20])
