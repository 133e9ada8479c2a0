"""clusterkv as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.clusters import ClusterIndex
from kvthaw.methods import resolve
from kvthaw.methods.clusterkv import clusterkv
from zoo import prompt


def test_options_reach_the_index_and_generated_tokens_are_clustered(llama: PreTrainedModel) -> None:
    options = {"batch": 32, "clusters_per_batch": 2, "tokens_per_cluster": 20, "distance": "inner", "policy": "mean"}
    with kvthaw.attach(llama, "clusterkv", budget=96, **options) as handle:
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
    ("options", "expected"),
    [
        ({}, (32, 32, "covering", 8)),
        ({"preset": "paper"}, (80, 80, "random", 20)),
        ({"preset": "code"}, (80, 40, "random", 20)),
        ({"preset": "paper", "tokens_per_cluster": 50, "iterations": 3}, (50, 80, "random", 3)),
    ],
)
def test_presets_reach_the_index(llama: PreTrainedModel, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    with kvthaw.attach(llama, "clusterkv", budget=64, **options) as handle:
        generate(llama, {"input_ids": prompt(1, 210)}, 2)
        for index in indices(handle):
            assert isinstance(index, ClusterIndex)
            assert (index.tokens_per_cluster, index.size, index.start, index.iterations) == expected
            prompts, clusters = index.seqs[0].marks[1]
            assert clusters == prompts // expected[0]


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
    with pytest.raises(ConfigError, match="preset is 'authors'; it must be one of default, paper, code"):
        clusterkv(preset="authors")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clusterkv has no option 'pages'"):
        resolve("clusterkv", pages=3)
