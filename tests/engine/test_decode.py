"""The loop of one-token steps: what it feeds, when it ends, and captured steps beside eager ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvthaw
import zoo
from kvthaw.engine.decode import decode, forward, generate
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from kvthaw.evaluate.probe import PerRequestStats


@torch.no_grad()
def prompted(model: PreTrainedModel, method: str, tokens: int = 90, **settings: int) -> tuple[kvthaw.Cache, Tensor]:
    cache = kvthaw.Cache(model, method, **settings)
    logits = prefill(model, cache, zoo.prompt(1, tokens)[0].tolist())
    cache.wait()
    return cache, logits


def test_a_token_enters_the_cache_when_the_next_one_is_asked_for(llama: PreTrainedModel) -> None:
    cache, logits = prompted(llama, "oracle", budget=64)
    steps = decode(llama, cache, logits[None], lambda after: after.argmax(dim=-1))
    next(steps)
    assert cache.get_seq_length() == 90
    next(steps)
    assert cache.get_seq_length() == 91


def test_it_ends_where_nothing_is_chosen(llama: PreTrainedModel) -> None:
    cache, logits = prompted(llama, "full")
    given = [[5], [6], [7]]
    seen: list[Tensor] = []

    def choose(after: Tensor) -> Sequence[int] | None:
        seen.append(after[0].clone())
        return given[len(seen) - 1] if len(seen) <= len(given) else None

    assert list(decode(llama, cache, logits[None], choose)) == given
    assert cache.get_seq_length() == 93
    ids = torch.cat((zoo.prompt(1, 90), torch.tensor(given).T), dim=1)
    with torch.no_grad():
        expected = llama(ids).logits[0, 89:]
    torch.testing.assert_close(torch.stack(seen), expected, atol=1e-4, rtol=1e-4)


def test_rows_stand_where_their_own_tokens_end(llama: PreTrainedModel) -> None:
    """Left padding, and transformers' own cache."""
    ids = zoo.prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :15] = 0
    cache = kvthaw.Cache(llama, "full")
    with torch.no_grad():
        llama(ids, past_key_values=cache, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0))
        short = DynamicCache(config=llama.config)
        llama(ids[:1, 15:], past_key_values=short)
    rows = forward(llama, cache, [[3], [3]])
    torch.testing.assert_close(rows[:1], forward(llama, short, [[3]]), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "pariskv", "clusterkv", "quest", "icecache-digest", "streaming"])
def test_captured_steps_on_a_gpu_are_the_eager_ones(method: str) -> None:
    """Also while selections are counted, for each row as for the row alone."""
    llama = zoo.build("llama", max_position_embeddings=1024).to("cuda")
    sizes = {} if method == "full" else {"budget": 128}
    found = []
    for capture in (False, True):
        cache, logits = prompted(llama, method, 700, **sizes)
        counts = PerRequestStats(cache)
        tokens = list(generate(llama, cache, logits, limit=40, sampling=Sampling(1.0, seed=3), capture=capture))
        found.append((tokens, counts.rows([39])))
        assert (cache.stats().captures > 0) is capture
    assert found[0] == found[1]
