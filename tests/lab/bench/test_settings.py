"""What a line depends on."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw.bench.settings import groups, possible
from kvthaw.engine.graph_runner import capturable
from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError
from kvthaw.methods import METHODS
from lab.bench.settings import ShapeSetting
from lab.bench.shapes import build
from timed import settings as all_of


def _all(*, method: tuple[str, ...] = ("quest",), **asked: object) -> list[ShapeSetting]:
    return all_of(*method, **asked)


def test_a_methods_own_options_come_before_the_common_ones() -> None:
    asked = ("full", "hf-dynamic", "pariskv:retrieved=100:window=512", "clusterkv:keep=2:hits=0.5:new_tokens=8", "streaming")
    full, theirs, paris, cluster, streaming = _all(method=asked, budget=300, hits=0.7, dense_layers=1, steps=["eager"])
    for dense in (full, theirs):
        assert (dense.budget, dense.retrieved, dense.dense_layers, dense.hits) == (None, None, None, None)
    assert (paris.method, paris.retrieved, paris.budget, paris.hits) == ("pariskv:window=512", 100, None, 0.7)
    assert (cluster.method, cluster.budget, cluster.hits, cluster.new_tokens) == ("clusterkv:keep=2", 300, 0.5, 8)
    assert (streaming.budget, streaming.hits, streaming.dense_layers) == (300, None, 1)


def test_retrieved_for_all_is_instead_of_the_budget() -> None:
    cluster, own = _all(method=("clusterkv", "quest:budget=64"), retrieved=50, steps=["eager"])
    assert (cluster.budget, cluster.retrieved) == (None, 50)
    assert (own.budget, own.retrieved) == (64, None)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"shape": "llama-7b"}, "shape is 'llama-7b'; it must be one of llama-3.1-8b"),
        ({"steps": ["fast"]}, "steps is 'fast'; it must be one of eager"),
        ({"prompt": "none"}, "prompt is 'none'"),
        ({"lengths": [1]}, "length is 1; it must be at least 2"),
        ({"method": ("quest",), "hits": 1.0}, "hits is 1.0"),
        ({"method": ("quest",), "budget": 3}, "budget is 3; the smallest"),
        ({"method": ("quest",), "shared": True}, "shared goes with prompt='filled'"),
        ({"method": ("quset",)}, "did you mean 'quest'"),
        ({"method": ("quest:budget=many",)}, "budget is 'many'; it must be"),
        ({"method": ("hf-dynamic:keep=1",)}, "hf-dynamic takes no options"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(asked: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _all(**asked)


def test_one_cache_serves_all_ways_to_take_steps() -> None:
    found = list(groups(_all(method=("full", "quest"), lengths=[64, 128], steps=("eager", "captured"))))
    assert [[(one.method, one.length, one.steps) for one in group] for group in found][:2] == [
        [("full", 64, "eager"), ("full", 64, "captured")],
        [("quest", 64, "eager"), ("quest", 64, "captured")],
    ]
    assert len(found) == 4


def test_captured_steps_need_a_gpu_and_no_other_work_of_the_host_than_a_search() -> None:
    captured = ("full", "streaming", "quest", "icecache-digest")
    asked = (
        *captured,
        "icecache-digest:transfer=bulk",
        "icecache-digest:prefetch=True",
        "infinigen",
        "hf-dynamic",
        "hf-offloaded",
    )
    settings = _all(method=asked, steps=("eager", "captured"))
    assert {one.method for one in settings if one.steps == "captured" and possible(one, cuda=True)} == {*captured}
    assert {one.method for one in settings if possible(one, cuda=False)} == set(asked) - {"hf-offloaded"}
    assert not any(possible(one, cuda=False) for one in settings if one.steps == "captured")


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return build("tiny", torch.device("cpu"))


@pytest.mark.parametrize(
    "method", [*METHODS, "icecache-digest:transfer=bulk", "icecache-digest:prefetch=True", "twilight:base=icecache-digest"]
)
def test_what_is_possible_is_what_a_cache_says_of_itself(tiny: PreTrainedModel, method: str) -> None:
    (captured,) = _all(method=(method,), steps=("captured",), budget=256)
    cache = Cache(tiny, captured.method, config=captured.config)
    with torch.no_grad():
        tiny(torch.arange(3, 20)[None], past_key_values=cache)
    assert possible(captured, cuda=True) is (capturable(cache) is None)
