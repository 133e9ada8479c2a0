"""Candidates that a crop rejects leave an index that remembers queries as it would be without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.methods import resolve
from kvthaw.regions import Regions


@pytest.mark.parametrize("method", ["h2o", "snapkv-refreshed"])
def test_an_index_forgets_the_queries_of_rejected_candidates(method: str) -> None:
    """No token leaves the ring meanwhile, so that nothing else would take the index back."""
    drawn = torch.randn(43, 3, 1, 2, 1, 8)
    tensors = []
    for accepted in (1, 3):
        settings = Settings(replace(resolve(method), regions=Regions(2, 6, 8)), budget=32, block_size=8)
        cache = KVCache(settings, range(1), 1)
        layer = cache.offloaded[0]
        prompt = drawn[:40].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        cache.attend(layer, *prompt, AttentionParams(0.5), [0])
        cache.sequences.verifying = True
        candidates = drawn[40 : 40 + accepted].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        cache.attend(layer, *candidates, AttentionParams(0.5))
        cache.sequences.verifying = False
        cache.crop(accepted - 1)
        assert layer.retriever is not None
        tensors.append([tensor.clone() for tensor in layer.retriever.index.tensors()])
    for one, several in zip(*tensors, strict=True):
        torch.testing.assert_close(one, several)
