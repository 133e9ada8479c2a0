"""icecache and its variants as methods: presets, options that reach the index, whole models."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.cache.choice import BulkCopy
from kvthaw.errors import ConfigError
from kvthaw.index.forest import TreeIndex
from kvthaw.methods import resolve
from kvthaw.methods.options import digest
from kvthaw.regions import Regions
from kvthaw_baselines.index.nodes import NodeIndex
from zoo import prompt


def test_the_name_of_the_paper_is_the_paper_s_method() -> None:
    paper = resolve("icecache")
    assert (paper.name, paper.unit, paper.transfer, paper.regions) == ("icecache", "page", BulkCopy, Regions(32, 32, 16))
    assert digest(paper) == digest(resolve("icecache:preset=paper:transfer=uva"))
    others = {
        digest(resolve(name)) for name in ("icecache", "icecache:preset=code", "icecache-digest", "icecache-digest-device")
    }
    assert len(others) == 4
    assert resolve("icecache-reuse").anchors == resolve("icecache-digest:reuse=3").anchors == 3


@pytest.mark.parametrize(
    ("method", "unit"),
    [
        *(("icecache", "page"), ("icecache:unit=token", "token"), ("icecache:merge=each", "page"), ("icecache-reuse", "page")),
        *(("icecache-digest", "token"), ("icecache-digest:unit=page", "page"), ("icecache-digest-device", "token")),
    ],
)
def test_a_method_says_the_unit_that_its_index_selects(llama: PreTrainedModel, method: str, unit: str) -> None:
    assert resolve(method).unit == unit
    with kvthaw.attach(llama, method, budget=64) as handle:
        generate(llama, {"input_ids": prompt(1, 120)}, 3)
        assert all(index.config.unit == unit for index in indices(handle) if isinstance(index, TreeIndex))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("icecache", TreeIndex), ("icecache:preset=code", TreeIndex)),
        *(("icecache-digest", TreeIndex), ("icecache-digest-device", NodeIndex)),
    ],
)
def test_the_search_is_the_one_asked_for(llama: PreTrainedModel, method: str, kind: type) -> None:
    with kvthaw.attach(llama, method, budget=64) as handle:
        generate(llama, {"input_ids": prompt(1, 120)}, 3)
        assert all(type(index) is kind for index in indices(handle))


def test_generated_tokens_make_nodes(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "icecache-digest-device", budget=64, promote=0.1, nodes_per_batch=4, field=64) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 100)
        for index in indices(handle):
            assert isinstance(index, NodeIndex)
            tokens, (prompts, nodes) = index.seqs[0].tokens, index.seqs[0].marks[1]
            assert nodes == -(-prompts // 10)
            assert tokens > prompts + 80
            assert index.seqs[0].units == nodes + -(-(tokens - prompts) // 10)
            full = index.order[0, 0, prompts : prompts + 40]
            assert not full.equal(full.sort().values), "in nodes, no longer in text order"


def test_options_that_do_not_fit_are_named() -> None:
    for name, message in (
        ("icecache:preset=default", "preset is 'default'; it must be one of paper, code"),
        ("icecache:prefetch=True", "icecache has no option 'prefetch'"),
        ("icecache-digest:preset=paper", "icecache-digest has no option 'preset'"),
        ("icecache-digest-device:promote=0.9", "promote is 0.9"),
        ("icecache-digest-device:threads=2", "icecache-digest-device has no option 'threads'"),
        ("icecache:field=64", "icecache has no option 'field'"),
        ("icecache:reuse=0", "reuse is 0"),
        ("icecache-digest:transfer=pigeon", "transfer is 'pigeon'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(name)
