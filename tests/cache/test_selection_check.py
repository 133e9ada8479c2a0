"""An index of a user's own that breaks its contract is refused by name instead of reading memory that is not its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import CacheError
from kvthaw.index.exact import ExactIndex
from kvthaw.methods import METHODS, resolve
from zoo import prompt

Spoil = Callable[[Selection], Any]


def spoiled(spoil: Spoil, after: int = 0) -> kvthaw.Method:
    """Oracle, whose selections are spoiled from a step on."""

    class Spoiled(ExactIndex):
        steps = 0

        def select(self, query: torch.Tensor, budget: int) -> Any:
            self.steps += 1
            found = super().select(query, budget)
            return found if self.steps <= after else spoil(found)

    return dataclasses.replace(resolve("oracle"), name="mine", index=Spoiled)


def with_row(row: int) -> Spoil:
    def spoil(found: Selection) -> Selection:
        rows = found.rows.clone()
        rows[0, 1, 2] = row
        return dataclasses.replace(found, rows=rows)

    return spoil


def twice(found: Selection) -> Selection:
    rows = found.rows.clone()
    rows[0, 1, 2] = rows[0, 1, 0]
    return dataclasses.replace(found, rows=rows)


BROKEN: dict[str, tuple[Spoil, str]] = {
    "none": (lambda found: None, r"Spoiled of mine, layer 0: select\(\) returned NoneType"),
    "a row behind": (
        with_row(10**9),
        r"Spoiled of mine, layer 0: sequence 0, KV head 1: row 1000000000 is outside .* \[2, \d+\)",
    ),
    "a row in the ring": (with_row(99), r"row 99 is outside"),
    "a row of the sink": (with_row(0), r"row 0 is outside"),
    "below -1": (with_row(-2), r"row -2 is outside"),
    "a row twice": (twice, r"sequence 0, KV head 1: row \d+ is there twice"),
    "a missing row": (with_row(-1), r"counts is (\d+), but \d+ rows"),
    "another dtype": (lambda found: dataclasses.replace(found, rows=found.rows.long()), r"rows is torch.int64 .* torch.int32"),
    "a head less": (lambda found: dataclasses.replace(found, rows=found.rows[:, :1]), r"rows is torch.int32 \[1, 1, "),
    "too many": (
        lambda found: dataclasses.replace(found, rows=torch.nn.functional.pad(found.rows, (0, 9), value=-1)),
        r"at most \d+ may be selected",
    ),
    "weights of another width": (
        lambda found: dataclasses.replace(found, log_weight=torch.zeros(1, 4, 3)),
        r"log_weight is .* must be",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("after", [0, 9])
def test_a_broken_selection_is_refused_at_any_step(llama: PreTrainedModel, case: str, after: int) -> None:
    spoil, message = BROKEN[case]
    cache = kvthaw.Cache(llama, spoiled(spoil, after), budget=32, dense_layers=0)
    ids = prompt(1, 100)
    with torch.no_grad():
        llama(ids[:, :90], past_key_values=cache)
        for t in range(90, 90 + after):
            llama(ids[:, t : t + 1], past_key_values=cache)
        with pytest.raises(CacheError, match=message):
            llama(ids[:, 99:], past_key_values=cache)


def test_a_right_one_is_taken(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=32):
        expected = llama.generate(prompt(2, 90), max_new_tokens=20, do_sample=False)
    with kvthaw.attach(llama, spoiled(lambda found: found), budget=32):
        assert torch.equal(llama.generate(prompt(2, 90), max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize("name", METHODS)
def test_kvthaw_s_own_indexes_are_tested_and_what_inherits_from_one_is_not(name: str) -> None:
    method = resolve(name)
    if method.index is None:
        return
    store, regions = HostStore(1, 1, 16, torch.float32), method.regions.for_budget(256)
    index = method.make_index(IndexContext(0, 1, 1, 16, torch.float32, torch.device("cpu"), store, regions, scale=1.0, rows=1))
    assert index.tested
    assert not type("Mine", (type(index),), {}).tested
