"""What leaves a full ring is indexed on the host before the token comes that pushes it out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.layer import FrozenLayer
from kvthaw.index.forest import TreeIndex
from zoo import prompt

IDS = prompt(2, 120)


def filled(model: PreTrainedModel) -> kvthaw.Cache:
    """Two lanes of 90 tokens under icecache, and decoded until the ring is full."""
    cache = kvthaw.Cache(model, "icecache", budget=64, dense_layers=0)
    step(model, cache, IDS[:, :90])
    for t in range(200):
        step(model, cache, IDS[:, t % 90 :][:, :1])
        if all(layer._ahead for layer in cache.frozen_layers):
            return cache
    raise AssertionError("the ring was never full")


def step(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def held(layer: FrozenLayer) -> list[tuple[int, int]]:
    """Of each lane: where the index ends and where the ring begins."""
    layer.settle()
    assert layer.group is not None
    index: Any = layer.group.index
    return [(index.length(lane), layer.indexed(lane)) for lane in range(layer.lanes)]


def test_the_index_goes_ahead_and_the_ring_follows(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    for layer in cache.frozen_layers:
        assert all(indexed == ring + layer.plan.regions.buffer for indexed, ring in held(layer))
    step(llama, cache, IDS[:, :1])
    for layer in cache.frozen_layers:
        assert not layer._ahead
        assert all(indexed == ring for indexed, ring in held(layer))


@pytest.mark.parametrize("drop", [1, 9, 40])
def test_a_crop_brings_it_back(llama: PreTrainedModel, drop: int) -> None:
    cache = filled(llama)
    cache.crop(-drop)
    for layer in cache.frozen_layers:
        assert all(indexed == ring for indexed, ring in held(layer))
    for t in range(40):
        step(llama, cache, IDS[:, t : t + 1])
    for layer in cache.frozen_layers:
        assert all(indexed in (ring, ring + layer.plan.regions.buffer) for indexed, ring in held(layer))


def test_a_dense_continuation_brings_it_back(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    step(llama, cache, IDS[:, :30])
    step(llama, cache, IDS[:, 30:31])
    for layer in cache.frozen_layers:
        assert all(indexed == ring for indexed, ring in held(layer))


def test_copies_and_new_lanes_keep_it(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    twin = copy.deepcopy(cache)
    assert torch.equal(step(llama, twin, IDS[:, :1]), step(llama, cache, IDS[:, :1]))
    cache = filled(llama)
    for layer in cache.layers:
        layer.reorder_cache(torch.tensor([1, 1]))
    logits = step(llama, cache, IDS[:1, :1].repeat(2, 1))
    assert torch.equal(logits[0], logits[1])


def test_rows_are_never_in_the_ring(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    asked = []

    def look(layer: FrozenLayer, query: Tensor, choice: Any) -> None:
        rows = choice.selection.rows
        asked.append(bool(((rows < layer.indexed(0)) | (rows < 0)).all()))

    for layer in cache.frozen_layers:
        layer.observer = look
    for t in range(40):
        step(llama, cache, IDS[:, t : t + 1])
    assert all(asked)
    assert len(asked) == 40 * len(cache.frozen_layers)


def test_a_failure_is_not_forgotten(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room for more")

    with monkeypatch.context() as patch:
        patch.setattr(TreeIndex, "append", fail)
        cache = filled(llama)
        for layer in cache.frozen_layers:
            with pytest.raises(MemoryError):
                layer.settle()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            cache.frozen_layers[0].settle()
    with pytest.raises(MemoryError, match="no room"):
        step(llama, cache, IDS[:, :1])
    cache.reset()
    step(llama, cache, IDS[:, :90])
    step(llama, cache, IDS[:, 90:91])
