"""A step fails whose layers are asked again, by layers that share their keys: before the last layer commits it, or behind it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.methods import resolve

PROMPT, NEW = 130, 32


def step(cache: KVCache, given: list[Tensor], start: int, stop: int, fails: str = "") -> Tensor:
    """Two layers; others ask the first of them twice, once before the second."""
    q, k, v = (x[:, :, start:stop] for x in given)
    first, second = cache.layers
    with cache.counted_forward():
        outs = [cache.attend(first, q[:1], k[:1], v[:1], AttentionParams(0.4))]
        for at in ("amid", "behind"):
            if at == "behind":
                outs.append(cache.attend(second, q[1:2], k[1:], v[1:], AttentionParams(0.4)))
            if stop == start + 1:
                outs.append(cache.attend_again(first, q[2:], k[:1], v[:1], AttentionParams(0.4)))
            if fails == at:
                raise InterruptedError
    return torch.cat(outs)


@pytest.mark.parametrize("fails", ["amid", "behind"])
@pytest.mark.parametrize("method", ["prkv:interval=9:page=8", "snapkv-refreshed:refresh=9", "h2o", "oracle"])
def test_all_queries_of_a_failed_step_are_undone(method: str, fails: str) -> None:
    torch.manual_seed(3)
    plain, cache = (KVCache(Settings(resolve(method), budget=64, block_size=16), [0, 1], 2) for _ in range(2))
    given = [torch.randn(rows, heads, PROMPT + NEW, 16) for rows, heads in ((3, 4), (2, 2), (2, 2))]
    for at in range(PROMPT - 1, PROMPT + NEW):
        start = 0 if at < PROMPT else at
        if at >= PROMPT and at % 3 == 0:
            with suppress(InterruptedError):
                step(cache, given, start, at + 1, fails)
        torch.testing.assert_close(step(cache, given, start, at + 1), step(plain, given, start, at + 1))
    found, expected = cache.stats(), plain.stats()
    assert (found.retrieved, found.sparse_steps) == (expected.retrieved, expected.sparse_steps)
