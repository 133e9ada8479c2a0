"""What leaves a full ring is indexed before the token comes that pushes it out: on the host, and behind a replayed step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import host_memory
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.graph_runner import GraphRunner
from kvthaw.errors import HostMemoryError
from kvthaw.index import batches
from kvthaw.index.forest import TreeIndex
from kvthaw.index.hybrid import HybridIndex
from zoo import build, prompt

IDS = prompt(2, 120)


def filled(model: PreTrainedModel) -> kvthaw.Cache:
    """Two sequences of 90 tokens under icecache-digest, and decoded until the ring is full."""
    cache = kvthaw.Cache(model, "icecache-digest", budget=64, dense_layers=0)
    step(model, cache, IDS[:, :90])
    for t in range(200):
        step(model, cache, IDS[:, t % 90 :][:, :1])
        if all(ahead(layer) for layer in cache.kv.offloaded):
            return cache
    raise AssertionError("the ring was never full")


def step(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def ahead(layer: OffloadedLayer) -> bool:
    """Whether tokens of every sequence left for the index that the ring still holds."""
    assert layer.storage.updater is not None
    return all(layer.storage.updater.indexed(seq) > layer.indexed(seq) for seq in range(layer.store.seqs))


def held(layer: OffloadedLayer) -> list[tuple[int, int]]:
    """Of each sequence: where the index ends and where the ring begins."""
    layer.wait()
    assert layer.retriever is not None
    index: Any = layer.retriever.index
    return [(index.length(seq), layer.indexed(seq)) for seq in range(layer.sequences.count)]


def test_the_index_goes_ahead_and_the_ring_follows(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    for layer in cache.kv.offloaded:
        assert all(indexed == ring + layer.plan.regions.buffer for indexed, ring in held(layer))
    step(llama, cache, IDS[:, :1])
    for layer in cache.kv.offloaded:
        assert not ahead(layer)
        assert all(indexed == ring for indexed, ring in held(layer))


def test_a_copy_leaves_no_index_behind(llama: PreTrainedModel) -> None:
    """A replayed step selects from tables that hold all that has left the rings: nothing is queued where nobody asks for it."""
    cache = kvthaw.Cache(llama, "clusterkv", budget=64, dense_layers=0)
    step(llama, cache, IDS[:1, :90])
    cache = copy.deepcopy(cache)
    while not cache.kv.sequences.full():
        step(llama, cache, IDS[:1, :1])
    cache.kv.run_ahead()
    for layer in cache.kv.offloaded:
        assert ahead(layer)
        assert layer.retriever is not None
        index: Any = layer.retriever.index
        known = [table.clone() for table in index.tensors()]
        index.join()
        assert all(map(torch.equal, known, index.tensors()))


@pytest.mark.parametrize("drop", [1, 40])
def test_a_crop_brings_it_back(llama: PreTrainedModel, drop: int) -> None:
    cache = filled(llama)
    cache.crop(-drop)
    for layer in cache.kv.offloaded:
        assert all(indexed == ring for indexed, ring in held(layer))
    for t in range(40):
        step(llama, cache, IDS[:, t : t + 1])
    for layer in cache.kv.offloaded:
        assert all(indexed in (ring, ring + layer.plan.regions.buffer) for indexed, ring in held(layer))


def test_a_dense_continuation_brings_it_back(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    step(llama, cache, IDS[:, :30])
    step(llama, cache, IDS[:, 30:31])
    for layer in cache.kv.offloaded:
        assert all(indexed == ring for indexed, ring in held(layer))


def test_copies_and_new_sequences_keep_it(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    twin = copy.deepcopy(cache)
    assert torch.equal(step(llama, twin, IDS[:, :1]), step(llama, cache, IDS[:, :1]))
    cache = filled(llama)
    for layer in cache.layers:
        layer.reorder_cache(torch.tensor([1, 1]))
    logits = step(llama, cache, IDS[:1, :1].repeat(2, 1))
    torch.testing.assert_close(logits[0], logits[1])


def test_rows_are_never_in_the_ring(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    asked = []

    def look(layer: OffloadedLayer, query: Tensor, choice: Any) -> None:
        rows = choice.selection.rows
        asked.append(bool(((rows < layer.indexed(0)) | (rows < 0)).all()))

    cache.kv.streams.observers.append(look)
    for t in range(40):
        step(llama, cache, IDS[:, t : t + 1])
    assert all(asked)
    assert len(asked) == 40 * len(cache.kv.offloaded)


def test_a_failure_is_not_forgotten(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room for more")

    with monkeypatch.context() as patch:
        patch.setattr(TreeIndex, "append", fail)
        cache = filled(llama)
        for layer in cache.kv.offloaded:
            with pytest.raises(MemoryError):
                layer.wait()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            cache.kv.offloaded[0].wait()
    with pytest.raises(MemoryError, match="no room"):
        step(llama, cache, IDS[:, :1])
    twin = filled(llama)
    step(llama, twin, IDS[:, :1])
    step(llama, cache, IDS[:, :1])  # the step that failed is taken again, and the index given what it lacks
    assert [held(layer) for layer in cache.kv.offloaded] == [held(layer) for layer in twin.kv.offloaded]
    again = step(llama, cache, IDS[:, 1:2]), step(llama, twin, IDS[:, 1:2])
    torch.testing.assert_close(*again, atol=5e-5, rtol=5e-5)  # rows may stand in other slots


@pytest.mark.parametrize(("method", "goes"), [("pariskv", True), ("clusterkv", True), ("streaming", True), ("h2o", False)])
def test_a_replayed_step_has_the_next_ones_work_done(llama: PreTrainedModel, method: str, goes: bool) -> None:
    """Logits are those of eager steps, whose work is done when the token comes; a crop and a longer continuation come between."""
    eager, replayed = (kvthaw.Cache(llama, method, budget=64, dense_layers=0) for _ in range(2))
    replay = GraphRunner(llama.forward, replayed, capture=False)

    found = 0
    for cache in (eager, replayed):
        step(llama, cache, IDS[:, :60])
    for t in range(30):
        ids = IDS[:, 60 + t : 61 + t]
        logits = replay(ids, torch.full((2, 1), replayed.get_seq_length()))
        assert torch.equal(logits, step(llama, eager, ids))
        layers = replayed.kv.offloaded
        went = [layer.storage.ahead(0, layer.indexed(0)) for layer in layers]
        full = replayed.kv.sequences.full()
        found += full and not replayed.kv.needs_host()
        assert goes or not any(went)
        if full and found % 2:
            for cache in (eager, replayed):
                cache.crop(-3)
            more = IDS[:, t : t + 20] if found % 4 == 1 else IDS[:, t : t + 2]
            assert torch.equal(step(llama, replayed, more), step(llama, eager, more))
    assert found >= 3 if goes else found == 0


def test_layers_cluster_together_what_left_their_rings_at_once(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers' batches are one call, behind a replayed step or before an eager one."""
    calls: list[int] = []
    real = batches.form
    monkeypatch.setattr(
        batches, "form", lambda every, count: (calls.append(sum(len(own.first) for own in every)), real(every, count))[1]
    )
    options = {"batch": 16, "clusters_per_batch": 2}
    eager, replayed = (kvthaw.Cache(llama, "clusterkv", budget=64, dense_layers=0, **options) for _ in range(2))
    replay = GraphRunner(llama.forward, replayed, capture=False)
    for cache in (eager, replayed):
        step(llama, cache, IDS[:, :60])
    calls.clear()
    eagerly: list[int] = []
    layers = len(eager.kv.offloaded)
    for t in range(44):
        ids = IDS[:, 60 + t : 61 + t]
        logits = replay(ids, torch.full((2, 1), replayed.get_seq_length()))
        batched = len(calls)
        assert torch.equal(logits, step(llama, eager, ids))
        eagerly += calls[batched:]
        del calls[batched:]
        if t == 20:  # a copy has what was put off, and goes on as the other does
            replayed = copy.deepcopy(replayed)
            replay = GraphRunner(llama.forward, replayed, capture=False)
    assert set(calls) == {2 * layers}  # two rows
    assert len(calls) >= 2
    assert eagerly == calls


@pytest.mark.parametrize("some_wait", [False, True])
def test_new_sets_take_effect_before_the_next_tokens_leave(some_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that PRKV's layers, which choose theirs in turn, all go ahead; a layer that could not is not forgotten."""
    if some_wait:
        monkeypatch.setattr(HybridIndex, "take_effect", put_off(HybridIndex.take_effect))
    model = build("llama", num_hidden_layers=4)
    eager, cache = (kvthaw.Cache(model, "prkv", budget=64, dense_layers=0, page=8, interval=32) for _ in range(2))
    replay = GraphRunner(model.forward, cache, capture=False)
    for each in (eager, cache):
        step(model, each, IDS[:1, :60])
    some = went = 0
    for t in range(44):
        ids = IDS[:1, 60 + t : 61 + t]
        logits = replay(ids, torch.full((1, 1), cache.get_seq_length()))
        assert torch.equal(logits, step(model, eager, ids))
        ran = [ahead(layer) for layer in cache.kv.offloaded]
        if cache.kv.sequences.full():
            assert cache.kv.needs_host() == (not all(ran))
            some += len(set(ran)) == 2
            went += all(ran)
            assert all(ran) or some_wait
    assert some > 0 if some_wait else went == 5


def put_off(take_effect: Callable[[HybridIndex, Sequence[int]], None]) -> Callable[[HybridIndex, Sequence[int]], None]:
    """Have it fail unless append() calls it."""

    def do(index: HybridIndex, seqs: Sequence[int]) -> None:
        if sys._getframe(1).f_code.co_name != "append":
            raise MemoryError("no room for more")
        take_effect(index, seqs)

    return do


def test_memory_that_is_not_to_be_had_is_an_error_of_the_token_that_needs_it(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the one before; where there is some again, nothing is missing."""
    plain, short = (kvthaw.Cache(llama, "clusterkv", budget=64, dense_layers=0, block_size=8) for _ in range(2))
    replay = GraphRunner(llama.forward, short, capture=False)
    for cache in (plain, short):
        step(llama, cache, IDS[:, :60])
    failed = 0
    for t in range(28):
        ids, positions = IDS[:, 60 + t : 61 + t], torch.full((2, 1), short.get_seq_length())
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "host_tensor", none)
            try:
                logits = replay(ids, positions)
            except HostMemoryError:
                failed += 1
        if short.get_seq_length() == plain.get_seq_length():
            logits = replay(ids, positions)
        assert torch.equal(logits, step(llama, plain, ids))
    assert failed >= 2


def none(*args: Any, **kwargs: Any) -> Tensor:
    raise HostMemoryError("no more")
