"""What the layers of a group share."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import retriever
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


@pytest.mark.parametrize("captured", [False, True])
def test_a_failed_step_undoes_a_select_that_ran(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """One that was recorded for a capture that failed never ran."""
    group, undone = group_of(llama, "quest"), list[None]()
    group.index = copy.copy(group.index)
    group.index.unask = lambda: undone.append(None)  # type: ignore[method-assign]
    context = group.context
    assert context.sequences is not None
    step = context.sequences.begin(1, dense=False)
    context.sequences.place(step, 0, context.device)
    monkeypatch.setattr(retriever, "capturing", lambda device: captured)
    group.choose(torch.zeros(2, context.q_heads, context.head_dim), 90)
    counted = group.residency.counts.clone()
    group.forget_step()
    group.forget_step()
    assert len(undone) == (not captured)
    assert (group.residency.counts < counted).any() == (not captured)
