"""clusterkv and clusterkv-plus: their settings, the paper's regions, a choice of each query head, whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import OneLayer
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.clusters import ClusterIndex
from kvthaw.methods import resolve
from zoo import prompt


def test_options_reach_the_index_and_generated_tokens_are_clustered(llama: PreTrainedModel) -> None:
    options = {"batch": 32, "clusters_per_batch": 2, "tokens_per_cluster": 20, "distance": "inner", "policy": "mean"}
    with kvthaw.attach(llama, "clusterkv-plus", budget=96, **options) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 100)
        for index in indices(handle):
            assert isinstance(index, ClusterIndex)
            assert (index.distance, index.policy, index.size) == ("inner", "mean", 16)
            tokens, (prompts, clusters) = index.seqs[0].tokens, index.seqs[0].marks[1]
            assert clusters == prompts // 20
            assert tokens > prompts + 64
            assert index.seqs[0].units == clusters + -(-(tokens - prompts) // 16)


def test_keeping_the_rows_of_more_steps_hits_more(llama: PreTrainedModel) -> None:
    rates = []
    for keep in (1, 3):
        with kvthaw.attach(llama, "clusterkv", budget=80, keep=keep) as handle:
            generate(llama, {"input_ids": prompt(1, 300)}, 30)
            rates.append(handle.stats().hit_rate)
    assert rates[0] < rates[1]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("clusterkv", (80, 80, "random", 20, "max")),
        ("clusterkv:preset=code:policy=mean", (80, 40, "random", 20, "mean")),
        ("clusterkv:tokens_per_cluster=50:iterations=3", (50, 80, "random", 3, "max")),
        ("clusterkv-plus", (32, 32, "covering", 8, "max")),
    ],
)
def test_settings_reach_the_index(llama: PreTrainedModel, method: str, expected: tuple[Any, ...]) -> None:
    with kvthaw.attach(llama, method, budget=64) as handle:
        generate(llama, {"input_ids": prompt(1, 210)}, 2)
        for index in indices(handle):
            assert isinstance(index, ClusterIndex)
            assert (index.tokens_per_cluster, index.size, index.start, index.iterations, index.policy) == expected
            prompts, clusters = index.seqs[0].marks[1]
            assert clusters == prompts // expected[0]


def test_generated_tokens_are_attended_until_a_batch_of_them_is_clustered() -> None:
    """Section III-B: m generated tokens become C+ clusters at once; the sink is never among them."""
    layer = OneLayer("clusterkv", 120, 66, budget=None, retrieved=24, batch=32, clusters_per_batch=2)
    for at in range(120, 186):
        rows = set.union(*layer.step())
        clustered = 119 + 32 * ((at - 119 - 1) // 32)
        assert max(rows) < clustered
        assert min(rows) >= 16
        assert layer.cache.sequences.held_at(0, at + 1) == 16 + at + 1 - clustered


@pytest.mark.parametrize(("heads", "group", "retrieved"), [(2, 4, 64), (1, 3, 50), (2, 4, 2)])
def test_with_preset_code_every_query_head_chooses_for_itself(heads: int, group: int, retrieved: int) -> None:
    """Each takes the clusters of largest q.mu up to its share of the rows, the last one cut, and attends to no others."""
    options: dict[str, Any] = {"preset": "code", "tokens_per_cluster": 10, "start": "random"}
    layer = OneLayer("clusterkv", 300, 1, heads=heads, group=group, budget=None, retrieved=retrieved, **options)
    rows = layer.step()
    index, share = layer.layer.retriever.index, max(1, retrieved // group)  # type: ignore[union-attr]
    assert isinstance(index, ClusterIndex)
    own: list[list[set[int]]] = []
    for head in range(heads):
        stops = index.stops[0, head, : int(index.counts[0]) + 1].tolist()
        own.append([])
        for query in layer.query[0, head * group : (head + 1) * group, 300]:
            best = (index.digests[0, head, : len(stops) - 1] @ query).argsort(descending=True).tolist()
            taken = [row for unit in best for row in index.order[0, head, stops[unit] : stops[unit + 1]].tolist()]
            own[-1].append(set(taken[:share]))
    every = [sorted(set.union(*some))[:retrieved] for some in own]
    assert rows == [set(some) for some in every]
    visible = [[each & set(some) | {*range(16), 299, 300} for each in heads] for heads, some in zip(own, every, strict=True)]
    expected = []
    for head, query_heads in enumerate(visible):
        for g, some in enumerate(query_heads):
            weights = layer.weights(300, [some] * heads)[head, g]
            expected.append(weights @ layer.values[0, head, :301].double())
    torch.testing.assert_close(layer.out[:, 0].double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_with_preset_code_a_budget_above_the_length_is_full_attention() -> None:
    layer = OneLayer("clusterkv", 90, 1, heads=2, group=2, budget=None, retrieved=100, preset="code")
    layer.step()
    full = (layer.weights(90) @ layer.values[0, :, :91].double()).flatten(0, 1)
    torch.testing.assert_close(layer.out[:, 0].double(), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": "l3"}, "distance is 'l3'"),
        ({"clusters_per_batch": 7}, "batch is 320; it must be a multiple of clusters_per_batch, 7"),
        ({"preset": "code", "batch": 30}, "batch is 30; it must be a multiple of clusters_per_batch, 8"),
        ({"clusters": 0}, "clusters is 0; it must be at least 1"),
        ({"iterations": 0}, "iterations is 0; it must be at least 1"),
        ({"tokens_per_cluster": -1}, "tokens_per_cluster is -1; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(llama: PreTrainedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kvthaw.Cache(llama, "clusterkv", **options)


def test_unknown_presets_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="preset is 'authors'; it must be one of paper, code"):
        resolve("clusterkv", preset="authors")
    with pytest.raises(ConfigError, match="clusterkv has no option 'pages'"):
        resolve("clusterkv", pages=3)
