"""What the layers of a group share."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.retriever import Retriever
from zoo import prompt


def group_of(llama: PreTrainedModel, method: str) -> Retriever:
    cache = kvthaw.Cache(llama, method, budget=64, dense_layers=0)
    with torch.no_grad():
        llama(prompt(2, 90), past_key_values=cache)
    found = cache.kv.offloaded[0].retriever
    assert found is not None
    return found


def test_an_index_in_anothers_place_is_the_one_that_is_joined(llama: PreTrainedModel) -> None:
    group, joined = group_of(llama, "quest"), list[str]()
    for name in ("first", "second"):
        index = copy.copy(group.index)
        index.join = lambda name=name: joined.append(name)  # type: ignore[attr-defined]
        group.index = index
        group.wait()
    assert joined == ["first", "second"]


def test_a_selection_buffer_stays_while_there_are_as_many_sequences(llama: PreTrainedModel) -> None:
    """Beams change places at every step, and its memory is page-locked on a GPU."""
    group = group_of(llama, "icecache-digest")
    buffer = group.buffer(2)
    group.reorder([1, 0])
    assert group.buffer(2) is buffer
    group.reorder([0, 0, 1])
    assert group.buffer(3).query.shape[0] == 3
