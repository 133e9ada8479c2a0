"""OmniKV against its paper's rule: a filter layer sees everything, those after it what it found; whole models."""

from __future__ import annotations

import pytest
import torch
from one_layer import SCALE, OneLayer
from transformers import PreTrainedModel
from unit_methods import generate

import kvthaw
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.cache.retriever import Choice
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from kvthaw_baselines.index.filters import FilterIndex
from shapes import close
from zoo import build, prompt


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("heads", "group"), [(2, 2), (1, 4), (3, 1)])
def test_a_filter_layer_is_the_papers(dense: bool, heads: int, group: int) -> None:
    layer = OneLayer("omnikv", 200, 40, heads=heads, group=group, budget=64, dense=dense)
    plan = layer.layer.plan
    assert plan is not None
    sink, begin = plan.regions.sink, 200 - plan.regions.window
    for at in range(200, 240):
        if at - begin == plan.regions.ring:
            begin += plan.regions.buffer
        found = layer.step()
        region = set(range(sink, begin))
        weights = layer.weights(at, [region] * heads).amax(dim=(0, 1))
        best = set(torch.topk(weights, plan.rows).indices.tolist())
        assert found == [best] * heads, "one choice for all heads"
        visible = None if dense else [(set(range(at + 1)) - region) | best] * heads
        expected = torch.einsum("hgt,htd->hgd", layer.weights(at, visible), layer.values[0, :, : at + 1].double())
        close(layer.out[:, 0], expected.flatten(0, 1))


def test_a_layer_after_it_attends_to_the_choice_alone() -> None:
    """What the filter layer found in its own values is not the follower's."""
    cache = KVCache(Settings(resolve("omnikv"), budget=64, block_size=32), [2, 3], 32)
    leader, follower = cache.offloaded
    assert (leader.leader, follower.leader) == (None, leader)
    choices: list[Choice | None] = []
    cache.streams.observers.append(lambda layer, query, choice: choices.append(choice))
    inputs = [[torch.randn(1, n, 230, 16) for n in (4, 2, 2)] for _ in range(2)]
    for start, stop in [(0, 200), *((at, at + 1) for at in range(200, 230))]:
        for layer, given in zip((leader, follower), inputs, strict=True):
            q, k, v = (x[:, :, start:stop] for x in given)
            out = cache.attend(layer, q, k, v, AttentionParams(SCALE))
        if start:
            choice = choices[-1]
            assert choice is not None
            q, k, v = (x[0].double() for x in inputs[1])
            seen = torch.zeros(2, stop, dtype=torch.bool)
            assert follower.plan is not None
            seen[:, : follower.plan.regions.sink] = seen[:, follower.indexed(0) :] = True
            for head in range(2):
                seen[head, choice.selection.rows[0, head].long()] = True
            scores = torch.einsum("hgd,htd->hgt", q[:, start].view(2, 2, -1), k[:, :stop]) * SCALE
            weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=2)
            close(out[0, :, 0], torch.einsum("hgt,htd->hgd", weights, v[:, :stop]).flatten(0, 1))


def test_a_softcap_is_refused_where_the_layer_would_ignore_it() -> None:
    """Of what a dense filter layer attends to beside its choice."""
    parts = [torch.randn(1, n, 201, 16) for n in (4, 2, 2)]
    how = AttentionParams(SCALE, softcap=5.0)
    for dense in (True, False):
        settings = Settings(resolve("omnikv", dense=dense), budget=64, block_size=32)
        cache = KVCache(settings, [0], 1)
        q, k, v = (x[:, :, :200] for x in parts)
        cache.attend(cache.layers[0], q, k, v, how)
        q, k, v = (x[:, :, 200:] for x in parts)
        if dense:
            with pytest.raises(ConfigError, match=r"omnikv attends to some tokens itself, without the softcap of 5\.0"):
                cache.attend(cache.layers[0], q, k, v, how)
        else:
            cache.attend(cache.layers[0], q, k, v, how)


def test_filter_layers_stand_at_the_papers_depth() -> None:
    model = build("llama", num_hidden_layers=32)
    for dense_layers, expected in ((2, [2, 8, 18]), (0, [0, 2, 8, 18]), (5, [5, 8, 18])):
        cache = kvthaw.Cache(model, "omnikv", budget=64, dense_layers=dense_layers)
        assert [kv.number for kv in cache.kv.offloaded if kv.leader is None] == expected
    cache = kvthaw.Cache(model, "omnikv", budget=64, dense_layers=4, filters=(4, 20))
    assert [kv.number for kv in cache.kv.offloaded if kv.leader is None] == [4, 20]
    with pytest.raises(ConfigError, match="layer 2 comes before the first"):
        kvthaw.Cache(model, "omnikv", budget=64, dense_layers=2, filters=(4, 20))


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "omnikv", budget=64, dense=False) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 4)
        for kv in handle.cache.kv.offloaded:
            assert kv.retriever is not None
            assert isinstance(kv.retriever.index, FilterIndex)
            assert set(kv.retriever.index.tables) == {"keys", "known"}
