"""icecache as a method: where it searches, options that reach the index, whole models."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.forest import TreeIndex
from kvthaw.index.nodes import NodeIndex
from kvthaw.methods import resolve
from kvthaw.methods.options import digest
from kvthaw.regions import Regions
from zoo import prompt


def test_where_it_searches_is_an_option() -> None:
    host, device = resolve("icecache"), resolve("icecache", search="device")
    assert (host.name, host.unit, device.name, device.unit) == ("icecache", "page", "icecache-device", "token")
    assert host.regions == device.regions == Regions(32, 32, 16)
    assert digest(resolve("icecache-device:field=64")) == digest(resolve("icecache:search=device:field=64"))
    assert resolve("icecache-reuse", search="device").anchors == 3


@pytest.mark.parametrize(("search", "kind"), [("host", TreeIndex), ("device", NodeIndex)])
def test_the_search_is_the_one_asked_for(llama: PreTrainedModel, search: str, kind: type) -> None:
    with kvthaw.attach(llama, "icecache", budget=64, search=search) as handle:
        generate(llama, {"input_ids": prompt(1, 120)}, 3)
        assert all(type(index) is kind for index in indices(handle))


def test_generated_tokens_make_nodes(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "icecache-device", budget=64, promote=0.1, nodes_per_batch=4, field=64) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 100)
        for index in indices(handle):
            assert isinstance(index, NodeIndex)
            tokens, (prompts, nodes) = index.seqs[0].tokens, index.seqs[0].marks[1]
            assert nodes == -(-prompts // 10)
            assert tokens > prompts + 80
            assert index.seqs[0].units == nodes + -(-(tokens - prompts) // 10)
            assert index.order is not None
            full = index.order[0, 0, prompts : prompts + 40]
            assert not full.equal(full.sort().values), "in nodes, no longer in text order"


def test_options_that_do_not_fit_are_named() -> None:
    for options, message in (
        ({"search": "gpu"}, "search is 'gpu'; it must be one of host, device"),
        ({"search": "device", "preset": "paper"}, "preset and threads are of the search on the host"),
        ({"search": "device", "threads": 2}, "preset and threads are of the search on the host"),
        ({"search": "device", "prefetch": True}, "prefetch, preset and threads are of the search on the host"),
        ({"search": "device", "promote": 0.9}, "promote is 0.9"),
        ({"search": "device", "page_size": 8}, "page_size"),
        ({"field": 64}, "field"),
        ({"reuse": 0}, "reuse is 0"),
        ({"transfer": "pigeon"}, "transfer is 'pigeon'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve("icecache", **options)
