"""Rows that are still on their way to the host: their readers wait for them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.methods import resolve

PROMPT = 100


class Late:
    """Stands in for the event of a copy: rows 64 .. 96 of the store are NaN until it has passed."""

    def __init__(self, store: HostStore) -> None:
        self.rows = store.read(0, 64, 96)
        self.kept, self.passed = self.rows.clone(), False
        self.rows.fill_(torch.nan)
        store.arrive(self, ordered=True)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        self.rows.copy_(self.kept)
        self.passed = True


def attend(cache: KVCache, text: Tensor, tokens: int) -> Tensor:
    """The next tokens of a text [3, 1, 2, T, D] of queries, keys and values."""
    at = cache.sequences.padded_length
    query, key, value = text[:, :, :, at : at + tokens]
    return cache.attend(cache.layers[0], query, key, value, AttentionParams(0.3))


def attended(cache: KVCache, text: Tensor) -> Tensor:
    return attend(cache, text, 1)


def cropped(cache: KVCache, text: Tensor) -> Tensor:
    cache.crop(20)
    return attend(cache, text, 1)


def copied(cache: KVCache, text: Tensor) -> Tensor:
    return attend(copy.deepcopy(cache), text, 1)


def moved(cache: KVCache, text: Tensor) -> Tensor:
    cache.reorder([0])
    return attend(cache, text, 1)


def read(cache: KVCache, text: Tensor) -> Tensor:
    return cache.offloaded[0].read(0, 60, PROMPT)


def cleared(cache: KVCache, text: Tensor) -> Tensor:
    """The copy would write into memory that another sequence has by then."""
    cache.clear(0)
    return torch.zeros(1)


@pytest.mark.parametrize("do", [attended, cropped, copied, moved, read, cleared])
def test_the_host_waits_for_rows_that_it_reads(do: Callable[[KVCache, Tensor], Tensor]) -> None:
    text = torch.randn(3, 1, 2, 2 * PROMPT, 16)
    caches = [KVCache(Settings(resolve("oracle"), budget=64, block_size=32), [0], 1) for _ in range(2)]
    for cache in caches:
        attend(cache, text, PROMPT)
    late = Late(caches[1].offloaded[0].store)
    expected, found = (do(cache, text) for cache in caches)
    assert late.passed
    assert torch.equal(found, expected)
