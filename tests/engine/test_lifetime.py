"""What a cache held is free when nobody holds it any longer, without Python's collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.engine.graph_runner import ElasticGraph
from zoo import KINDS, prompt

IDS = prompt(1, 90)


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held(cache: kvthaw.Cache) -> list[weakref.ref]:
    """What a cache should let go of, after a prompt and some steps: its layers and their memory."""
    stores = [layer.store for layer in cache.kv.offloaded]
    groups = [layer.retriever for layer in cache.kv.offloaded if layer.retriever is not None]
    return [weakref.ref(one) for one in (cache, *cache.layers, *cache.kv.layers, *stores, *groups)]


def decode(model: PreTrainedModel, cache: kvthaw.Cache, steps: int = 6) -> None:
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        for t in range(steps):
            model(IDS[:, t : t + 1], past_key_values=cache)


def searching() -> int:
    return sum(thread.name.startswith("kvthaw") for thread in threading.enumerate())


@pytest.mark.parametrize("method", KINDS)
def test_a_dropped_cache_is_freed(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 64}))
    before = searching()
    decode(llama, cache)
    cache.replay = ElasticGraph(llama.forward, cache, capture=False)
    twin = cache.fork("oracle")
    found = held(cache)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("kvthaw")]
    del cache
    assert not [ref() for ref in found if ref() is not None]
    for thread in workers[before:]:
        thread.join(10)
    assert searching() <= before
    assert twin.get_seq_length() == 96


@pytest.mark.parametrize("method", kvthaw.METHODS)
def test_a_reset_cache_holds_nothing(llama: PreTrainedModel, method: str) -> None:
    """Not in the queue of its indexes' work either."""
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 64}))
    decode(llama, cache, 0)
    found = [weakref.ref(layer.store) for layer in cache.kv.offloaded]
    found += [weakref.ref(layer.retriever.index) for layer in cache.kv.offloaded if layer.retriever is not None]
    cache.reset()
    cache.kv.streams.drain()  # a job that began before holds its index
    gc.collect()
    assert not [ref() for ref in found if ref() is not None]


@pytest.mark.parametrize("method", ["full", "oracle", "icecache-digest", "clusterkv"])
def test_generate_keeps_one_cache_and_detach_none(llama: PreTrainedModel, method: str) -> None:
    handle = kvthaw.attach(llama, method, **({} if method == "full" else {"budget": 64}))
    llama.generate(IDS, max_new_tokens=3, do_sample=False)
    first = held(handle.cache)
    llama.generate(IDS, max_new_tokens=3, do_sample=False)
    assert not [ref() for ref in first if ref() is not None]
    second = held(handle.cache)
    handle.detach()
    assert not [ref() for ref in second if ref() is not None]


def test_what_a_prefix_cache_keeps_is_freed_with_it(llama: PreTrainedModel) -> None:
    prefix = kvthaw.PrefixCache()
    batch = kvthaw.Batch(
        llama, "quest", max_seqs=1, capacity=200, budget=32, block_size=16, host_bytes=1 << 30, prefix_cache=prefix
    )
    batch.join(IDS[0], max_new_tokens=3, stop=[])
    while batch.requests:
        batch.step()
    found = [weakref.ref(one) for one in (prefix, batch.cache)]
    assert prefix.stats().kept_bytes
    del batch, prefix
    assert not [ref() for ref in found if ref() is not None]
