"""pariskv as a method: options reach the index, dense fallback, whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import OneLayer
from transformers import PreTrainedModel

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.codes import CodesIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from lab.ablations import registered
from zoo import build, prompt, ragged


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    return model.generate(**inputs, **({"max_new_tokens": 12, "do_sample": False} | how))


def indices(handle: Any) -> list[CodesIndex]:
    return [kv.retriever.index for kv in handle.cache.kv.offloaded]


def test_regions_and_dense_layers_are_the_papers() -> None:
    method = resolve("pariskv")
    assert (method.regions, method.dense_layers) == (Regions(128, 256, 512), 0)
    assert resolve("pariskv", sink=64, window=512, buffer=256).regions == Regions(64, 512, 256)
    deep = build("llama", num_hidden_layers=16)
    for name, dense in (("pariskv", 0), ("pariskv-plus", 2)):
        base = kvthaw.Cache(deep, name)
        assert base.settings.dense_layers == dense
        assert [base.fork(other).settings.dense_layers for other in ("pariskv", "quest")] == [0, 2]


def test_stats_say_which_regions_a_budget_makes_smaller(llama: PreTrainedModel) -> None:
    for settings, regions, words in (
        ({"budget": 256}, Regions(16, 64, 32), True),
        ({"retrieved": 100}, Regions(128, 256, 512), False),
    ):
        with kvthaw.attach(llama, "pariskv", **settings) as handle:
            generate(llama, {"input_ids": prompt(1, 40)}, max_new_tokens=2)
            stats = handle.stats()
            assert (stats.regions, stats.paper_regions) == (regions, Regions(128, 256, 512))
            assert ("sink 16 of 128, window 64 of 256, buffer 32 of 512" in str(stats)) == words


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pariskv", {}),
        ("pariskv", {"preset": "code"}),
        ("pariskv", {"votes": "binary"}),
        ("pariskv-plus", {}),
        ("pariskv-plus-ablated", {"votes": "tiered"}),
        ("pariskv-each", {}),
        ("pariskv-ablated", {"centroids": "learned"}),
        ("pariskv-ablated", {"rotate": False}),
    ],
)
def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel, method: str, options: dict[str, Any]) -> None:
    batch = ragged([90, 37, 61])
    expected = generate(llama, batch)
    with registered(), kvthaw.attach(llama, method, budget=1024, window=8, buffer=8, **options) as handle:
        assert torch.equal(generate(llama, batch), expected)
        assert handle.stats().sparse_steps > 0


def test_presets_and_options_reach_the_index(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(1, 200)}
    with kvthaw.attach(llama, "pariskv", budget=32, preset="code", rho=0.4, beta=0.3, votes="binary") as handle:
        generate(llama, inputs)
        index = indices(handle)[0]
        assert index.policy == "mean_query"
        assert (index.ratios.rho, index.ratios.beta, index.ratios.tiered) == (0.4, 0.3, False)
        stats = handle.stats()
        assert stats.attended_max is not None
        assert stats.attended_max <= 32
    for name, wanted, policy, grows in (
        ("pariskv:rho=0.2:beta=0.1", [300, 900, 4000], "max", True),
        ("pariskv", [1500, 2250, 4000], "max", True),
        ("pariskv:preset=code", [1500, 2250, 4000], "mean_query", True),
        ("pariskv-plus", [1500, 2250, 4000], "max", False),
    ):
        with kvthaw.attach(llama, name, budget=32) as handle:
            generate(llama, inputs)
            index = indices(handle)[0]
            assert (index.policy, index.traits.grows) == (policy, grows)
            assert [index.ratios.wanted(n, 100) for n in (3000, 9000, 40000)] == wanted


@registered()
def test_each_query_head_attends_to_the_rows_that_it_would_choose_alone() -> None:
    """Algorithm 1 is stated for one head: in `pariskv-each` a group's outputs are those of as many heads of their own KV."""
    for group, rows in ((3, 24), (2, 9)):
        torch.manual_seed(group)
        many = OneLayer("pariskv-each", 300, 3, group=group, budget=None, retrieved=rows, window=16, buffer=8)
        alone = []
        for member in range(group):
            one = OneLayer("pariskv", 300, 3, group=1, budget=None, retrieved=rows // group, window=16, buffer=8)
            one.query[:], one.keys[:], one.values[:] = many.query[:, member::group], many.keys, many.values
            one.cache.reset()
            one.take(0, 300)
            alone.append(one)
        for at in range(300, 303):
            together = many.take(at, at + 1).unflatten(0, (many.heads, group))
            for member, one in enumerate(alone):
                torch.testing.assert_close(together[:, member], one.take(at, at + 1))
    with pytest.raises(ConfigError, match="must be at least 3"):
        OneLayer("pariskv-each", 300, 1, group=3, budget=None, retrieved=2).take(300, 301)


def test_below_the_full_attention_threshold_it_attends_densely(llama: PreTrainedModel) -> None:
    """A region of 4 to 64 tokens, 4 rows of it retrieved: exact with the threshold, not without."""
    inputs = {"input_ids": prompt(1, 140)}
    expected = generate(llama, inputs, max_new_tokens=60)
    same = []
    for threshold in (100, 0):
        with kvthaw.attach(llama, "pariskv", retrieved=4, full_threshold=threshold, window=8, buffer=8) as handle:
            same.append(torch.equal(generate(llama, inputs, max_new_tokens=60), expected))
            assert all(50 < index.counts[0] < 100 for index in indices(handle))
    assert same == [True, False]


def test_rows_are_reproducible_and_follow_the_seed(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(1, 300)}
    runs = []
    for seed in (0, 0, 1):
        with kvthaw.attach(llama, "pariskv", budget=32, seed=seed) as handle:
            runs.append((generate(llama, inputs), indices(handle)[0].rotation.basis.clone()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "authors"}, "preset is 'authors'"),
        ({"votes": "many"}, "votes is 'many'"),
        ({"rho": 0.1, "beta": 0.2}, "rho is 0.1 and beta is 0.2"),
        ({"beta": 0.2, "rho": 0.1}, "rho is 0.1 and beta is 0.2"),
        ({"beta": 0.2, "candidates": 200}, "beta is 0.2 and candidates is 200"),
        ({"policy": "union"}, "policy is 'union'"),
        ({"policy": "mean"}, "policy is 'mean'; it must be one of max, mean_query"),
        ({"full_threshold": -1}, "full_threshold is -1"),
        ({"threshold": 1}, "threshold"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("pariskv", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": 0.2}, "no option 'rho'"),
        ({"centre": "no"}, "centre is 'no'"),
    ],
)
def test_bad_options_of_pariskv_plus_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("pariskv-plus", **options)


@registered()
def test_bad_options_of_ablations_are_refused_at_once() -> None:
    for name, words in (
        ("pariskv-ablated:centroids=new", "centroids is 'new'"),
        ("pariskv-ablated:rotate=no", "rotate is 'no'"),
        ("pariskv-plus-ablated:votes=many", "votes is 'many'"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve(name)


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
    """A prompt in chunks is indexed again, so that its centre is that of the prompt given at once."""
    ids = prompt(1, 420)
    caches = []
    for sizes in ((420,), (180, 180, 60)):
        cache, at = kvthaw.Cache(llama, "pariskv-plus", retrieved=8, window=8, buffer=8, dense_layers=0), 0
        with torch.no_grad():
            for size in sizes:
                llama(ids[:, at : at + size], past_key_values=cache)
                at += size
            llama(ids[:, :1], past_key_values=cache)
        caches.append(cache)
    for one, other in zip(*(cache.kv.offloaded for cache in caches), strict=True):
        a, b = one.retriever.index, other.retriever.index
        torch.testing.assert_close(a.tables["centre"], b.tables["centre"])
        assert a.counts == b.counts
