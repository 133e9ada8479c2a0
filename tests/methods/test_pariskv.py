"""pariskv as a method: options reach the index, dense fallback, whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.codes import CodesIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import build, prompt, ragged


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    return model.generate(**inputs, **({"max_new_tokens": 12, "do_sample": False} | how))


def indices(handle: Any) -> list[CodesIndex]:
    return [kv.retriever.index for kv in handle.cache.frozen_layers]


def test_regions_are_the_papers() -> None:
    method = resolve("pariskv")
    assert (method.name, method.unit, method.regions) == ("pariskv", "token", Regions(128, 256, 512))
    assert resolve("pariskv", window=512, buffer=256).regions == Regions(128, 512, 256)


@pytest.mark.parametrize(
    "options", [{}, {"preset": "paper"}, {"preset": "code"}, {"policy": "mean"}, {"votes": "binary"}, {"centroids": "learned"}]
)
def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    batch = ragged([90, 37, 61])
    expected = generate(llama, batch)
    with kvthaw.attach(llama, "pariskv", budget=1024, window=8, buffer=8, **options) as handle:
        assert torch.equal(generate(llama, batch), expected)
        assert handle.stats().sparse_steps > 0


def test_presets_and_options_reach_the_index(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(1, 200)}
    with kvthaw.attach(llama, "pariskv", budget=32, preset="code", rho=0.4, beta=0.3, votes="binary", rotate=False) as handle:
        generate(llama, inputs)
        index = indices(handle)[0]
        assert index.policy == "mean_query"
        assert (index.ratios.rho, index.ratios.beta, index.ratios.tiered) == (0.4, 0.3, False)
        assert index._rotation.scale == 1.0
        stats = handle.stats()
        assert stats.attended_max is not None
        assert stats.attended_max <= 32
    for options, graded in (({}, True), ({"preset": "paper"}, False), ({"rho": 0.5}, False)):
        with kvthaw.attach(llama, "pariskv", budget=32, **options) as handle:
            generate(llama, inputs)
            index = indices(handle)[0]
            assert (index.policy, index._graded, index._centre) == ("max", graded, options.get("preset") is None)


def test_below_the_full_attention_threshold_it_attends_densely(llama: PreTrainedModel) -> None:
    """A region of 4 to 64 tokens, 4 rows of it retrieved: exact with the threshold, not without."""
    inputs = {"input_ids": prompt(1, 140)}
    expected = generate(llama, inputs, max_new_tokens=60)
    same = []
    for threshold in (100, 0):
        with kvthaw.attach(llama, "pariskv", retrieved=4, full_threshold=threshold, window=8, buffer=8) as handle:
            same.append(torch.equal(generate(llama, inputs, max_new_tokens=60), expected))
            assert all(50 < index._counts[0] < 100 for index in indices(handle))
    assert same == [True, False]


def test_rows_are_reproducible_and_follow_the_seed(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(1, 300)}
    runs = []
    for seed in (0, 0, 1):
        with kvthaw.attach(llama, "pariskv", budget=32, seed=seed) as handle:
            runs.append((generate(llama, inputs), indices(handle)[0]._rotation.basis.clone()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "authors"}, "preset is 'authors'"),
        ({"votes": "many"}, "votes is 'many'"),
        ({"rho": 0.1, "beta": 0.2}, "rho is 0.1 and beta is 0.2"),
        ({"rho": 0.2, "votes": "graded"}, "rho is 0.2 and votes is 'graded'"),
        ({"centre": "no"}, "centre is 'no'"),
        ({"policy": "union"}, "policy is 'union'"),
        ({"full_threshold": -1}, "full_threshold is -1"),
        ({"centroids": "new"}, "centroids is 'new'"),
        ({"rotate": "false"}, "rotate is 'false'"),
        ({"threshold": 1}, "threshold"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("pariskv", **options)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("pariskv", {"head_dim": 4}, "head_dim is 4; pariskv needs at least 8"),
        ("pariskv:candidates=50", {}, "candidates is 50; it must be at least the 100 rows"),
    ],
)
def test_what_only_the_model_tells_is_refused_with_the_prompt(method: str, settings: dict[str, Any], words: str) -> None:
    """Before a layer has attended; another method then takes the same prompt."""
    model, inputs = build("llama", **settings), {"input_ids": prompt(1, 60)}
    expected = generate(model, inputs, max_new_tokens=4)
    with pytest.raises(ConfigError, match=words), kvthaw.attach(model, method, retrieved=100):
        generate(model, inputs)
    with kvthaw.attach(model, "oracle", budget=128):
        assert torch.equal(generate(model, inputs, max_new_tokens=4), expected)


def test_centre_and_grades_keep_a_text_in_pieces_as_it_is(llama: PreTrainedModel) -> None:
    """A prompt in chunks is indexed anew, so that its centre is that of the prompt given at once."""
    ids = prompt(1, 420)
    caches = []
    for sizes in ((420,), (180, 180, 60)):
        cache, at = kvthaw.Cache(llama, "pariskv", retrieved=8, window=8, buffer=8, dense_layers=0), 0
        with torch.no_grad():
            for size in sizes:
                llama(ids[:, at : at + size], past_key_values=cache)
                at += size
            llama(ids[:, :1], past_key_values=cache)
        caches.append(cache)
    for one, other in zip(*(cache.frozen_layers for cache in caches), strict=True):
        a, b = one.retriever.index, other.retriever.index
        torch.testing.assert_close(a._data["centre"], b._data["centre"])
        assert a._counts == b._counts
