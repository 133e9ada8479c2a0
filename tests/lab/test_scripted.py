"""Rows by a script."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Cache
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from lab.scripted import scripted


def _decoded(
    model: PreTrainedModel, method: str, hits: float, steps: int = 12, batch: int = 2
) -> tuple[Cache, list[torch.Tensor]]:
    """A cache after some steps, and the rows of each step of its first layer."""
    cache = Cache(model, scripted(resolve(method), hits), budget=64)
    ids = torch.randint(0, model.config.vocab_size, (batch, 200))
    rows = []
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(steps):
            model(ids[:, :1], past_key_values=cache)
            assert cache.kv.offloaded[0].retriever is not None
            rows.append(cache.kv.offloaded[0].retriever.choices[-1].selection.rows)
    return cache, rows


@pytest.mark.parametrize("method", ["quest", "icecache-digest"])
def test_neighbouring_steps_share_what_was_asked_for(llama: PreTrainedModel, method: str) -> None:
    cache, rows = _decoded(llama, method, 0.75)
    layer = cache.kv.offloaded[0]
    assert layer.plan is not None
    for before, now in pairwise(rows):
        for seq in range(2):
            for head in range(now.shape[1]):
                mine, theirs = set(now[seq, head].tolist()), set(before[seq, head].tolist())
                assert len(mine) == layer.plan.rows
                assert len(mine & theirs) == layer.plan.rows - round(0.25 * layer.plan.rows)
                assert min(mine) >= layer.plan.regions.sink
                assert max(mine) < layer.indexed(seq)
    hits = cache.stats().hit_rate
    assert hits is not None
    assert hits == pytest.approx(0.75 * 11 / 12, abs=0.03)  # the first step finds nothing


def test_rows_differ_between_sequences_heads_and_layers(llama: PreTrainedModel) -> None:
    cache, rows = _decoded(llama, "quest", 0.0, steps=2)
    seqs = rows[0]
    groups = [kv.retriever for kv in cache.kv.offloaded]
    others = [group.choices[-1].selection.rows for group in groups if group is not None]
    assert not torch.equal(seqs[0], seqs[1])
    assert not torch.equal(seqs[0, 0], seqs[0, 1])
    assert not torch.equal(others[0], others[1])


def test_an_anchors_script_is_its_followers(llama: PreTrainedModel) -> None:
    cache, _ = _decoded(llama, "icecache-digest:reuse=3", 0.5)
    hits = cache.stats().hit_rate
    assert hits == pytest.approx(0.5 * 11 / 12, abs=0.05)


@pytest.mark.parametrize(("method", "rebuilds"), [("shadowkv", True), ("oracle", False)])
def test_the_traits_of_an_index_stay_known(llama: PreTrainedModel, method: str, rebuilds: bool) -> None:
    group = _decoded(llama, method, 0.5, steps=1)[0].kv.offloaded[0].retriever
    assert group is not None
    assert group.index.traits.rebuilds is rebuilds


def test_a_region_too_short_is_refused(llama: PreTrainedModel) -> None:
    cache = Cache(llama, scripted(resolve("quest"), 0.5), budget=64)
    ids = torch.ones((1, 40), dtype=torch.int64)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        with pytest.raises(ConfigError, match=r"hits is 0\.5; that needs"):
            llama(ids[:, :1], past_key_values=cache)
    with pytest.raises(ConfigError, match="full retrieves nothing"):
        scripted(resolve("full"), 0.5)
