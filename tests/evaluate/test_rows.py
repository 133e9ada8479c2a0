"""How many samples share their steps."""

from __future__ import annotations

import pytest
import torch

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.evaluate.prefills import MOST_BYTES, MOST_ROWS, Rows
from kvthaw.evaluate.probe import PerRequestStats
from zoo import build, prompt


def test_as_many_as_their_keys_and_values_leave_room_for() -> None:
    rows, token = Rows(build("llama"), None), 2 * 2 * 2 * 16 * 4  # layers, KV heads, head_dim, float32
    assert rows.at(100) == MOST_ROWS
    assert rows.at(MOST_BYTES // (token * 5)) == 5
    assert rows.at(MOST_BYTES) == 1
    assert Rows(build("llama"), 3).at(MOST_BYTES) == 3


def test_a_model_whose_layers_differ_takes_one() -> None:
    model = build("gemma4")
    assert Rows(model, None).at(100) == 1
    with pytest.raises(ConfigError, match=r"batch is 2; .*so only 1 works"):
        Rows(model, 2)


@torch.no_grad()
@pytest.mark.parametrize("method", ["quest", "snapkv"])
def test_what_a_row_attended_to_and_holds_is_what_its_cache_says(method: str) -> None:
    model = build("llama", num_hidden_layers=3)
    cache = kvthaw.Cache(model, method, budget=64)
    model(prompt(1, 120), past_key_values=cache)
    counts = PerRequestStats(cache)
    for token in prompt(1, 20, seed=1).split(1, dim=1):
        model(token, past_key_values=cache)
    cache.wait()
    (row,), stats = counts.rows([20]), cache.stats()
    same = ("sparse_steps", "attended_max", "hit_rate", "kv_dense_bytes", "kv_host_bytes")
    assert {name: row[name] for name in same} == {name: getattr(stats, name) for name in same}
    assert row["attended_mean"] == pytest.approx(stats.attended_mean)
    assert 0 < row["hit_rate"] < 1


@torch.no_grad()
def test_rows_that_are_alike_attend_to_as_many_tokens_together_as_one_alone() -> None:
    """Also in layers that ask with queries of their own for the keys of another one."""
    model, found = build("gemma3n"), []
    for rows in (1, 2):
        cache = kvthaw.Cache(model, "oracle", budget=64, dense_layers=0)
        model(prompt(1, 90).expand(rows, -1), past_key_values=cache)
        for token in prompt(1, 5, seed=2).split(1, dim=1):
            model(token.expand(rows, -1), past_key_values=cache)
        stats = cache.stats()
        found.append((stats.attended_mean, stats.hit_rate, stats.sparse_steps))
    assert found[0] == pytest.approx(found[1])
