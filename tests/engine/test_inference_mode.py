"""A cache serves under torch.inference_mode() and torch.no_grad() alike, and from one to the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw import Cache
from zoo import DISTINCT, build, prompt, ragged

BATCH = ragged([60, 37])
EVICT = ("streaming", "h2o", "snapkv", "snapkv-refreshed")


def reordered(cache: Cache) -> Cache:
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def repeated(cache: Cache) -> Cache:
    cache.batch_repeat_interleave(2)
    return cache


def selected(cache: Cache) -> Cache:
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def cropped(cache: Cache) -> Cache:
    cache.crop(-2)
    return cache


CHANGES: dict[str, Callable[[Cache], Cache]] = {
    "reorder": reordered,
    "repeat": repeated,
    "select": selected,
    "crop": cropped,
    "deepcopy": copy.deepcopy,
    "fork": lambda cache: cache.fork("oracle", budget=48),
}


def decode(model: PreTrainedModel, cache: Cache, steps: int, seed: int) -> Tensor:
    ids = prompt(len(cache.kv.sequences.left_pad), steps, seed=seed)
    return torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(steps)], dim=1)


def after(
    model: PreTrainedModel, method: str, change: str, modes: list[Callable[[], AbstractContextManager[object]]]
) -> Tensor:
    """Logits of steps that follow a prompt and a change, each in a mode."""
    cache = Cache(model, method, budget=48)
    with modes[0]():
        model(**BATCH, past_key_values=cache)
        decode(model, cache, 2, seed=1)
        cache = CHANGES[change](cache)
    found = []
    for seed, mode in enumerate(modes[1:]):
        with mode():
            found.append(decode(model, cache, 4, seed=seed).clone())
    return torch.cat(found, dim=1)


PAIRS = [
    (method, [change for change in CHANGES if change != "fork" or method not in EVICT][turn % 5])
    for turn, method in enumerate(DISTINCT)
] + [("icecache-digest", "fork"), ("pariskv", "fork")]
"""Methods take turns at the changes that they allow."""


@pytest.mark.parametrize(("method", "change"), PAIRS)
def test_what_changes_a_cache(method: str, change: str) -> None:
    llama = build("llama", num_hidden_layers=2)
    expected = after(llama, method, change, [torch.no_grad] * 3)
    with torch.no_grad():
        found = after(llama, method, change, [torch.inference_mode, torch.inference_mode, torch.no_grad])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["full", "icecache-digest", "pariskv", "clusterkv", "h2o"])
def test_generate(llama: PreTrainedModel, method: str) -> None:
    def beams() -> Tensor:
        with kvthaw.attach(llama, method, budget=48):
            return llama.generate(**BATCH, num_beams=2, max_new_tokens=12, do_sample=False)

    expected = beams()
    with torch.inference_mode():
        assert torch.equal(beams(), expected)


def test_a_batch(llama: PreTrainedModel) -> None:
    def served() -> list[list[int]]:
        batch = kvthaw.Batch(llama, "icecache-digest", max_seqs=2, capacity=120, budget=48)
        first = [batch.join(prompt(1, 60), max_new_tokens=20, stop=[]), batch.join(prompt(1, 30), max_new_tokens=5, stop=[])]
        while batch.requests:
            batch.step()
        first.append(batch.join(prompt(1, 50, seed=3), max_new_tokens=20, stop=[]))
        while batch.requests:
            batch.step()
        return [request.tokens for request in first]

    expected = served()
    with torch.inference_mode():
        assert served() == expected


def test_a_copy_beside_its_original(llama: PreTrainedModel) -> None:
    """The copy that is made of a shared block when one of them writes into it outlives the mode, too."""

    def both() -> list[Tensor]:
        cache = Cache(llama, "oracle", budget=16)
        llama(prompt(1, 20), past_key_values=cache)
        return [decode(llama, one, 9, seed=seed).clone() for seed, one in enumerate((copy.deepcopy(cache), cache))]

    with torch.no_grad():
        expected = both()
    with torch.inference_mode():
        found = both()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
