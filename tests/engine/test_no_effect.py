"""A setting that a method or a model has no use for is refused, or stats() says that it changes nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import kvthaw
from kvthaw import Cache, ConfigError
from zoo import build, prompt

DENSE = {"budget": 64, "dense_layers": 1, "device_memory": "1MiB", "full_below": 100, "seed": 3, "sparse_queries": 4}
STORED = {"block_size": 16, "host_bytes": 1 << 20, "device_memory": "1MiB"}
NOTHING: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("llama", "full", DENSE, set(DENSE)),
    ("llama", "full", {"block_size": 16, "host_bytes": 1 << 20}, set()),  # of prompts that are kept
    ("llama", "streaming", STORED | {"seed": 3}, {"device_memory", "seed"}),
    ("llama", "streaming", {"budget": 64, "dense_layers": 1, "full_below": 100, "sparse_queries": 4}, set()),
    ("llama", "quest", DENSE | STORED, set()),
    ("llama", "snapkv", STORED, set()),
    ("llama", "icecache", DENSE | STORED, set()),  # full attention's KV is bounded
    ("llama", "icecache", STORED, {"device_memory"}),
    ("llama", "auto", STORED, set()),
    ("llama", "auto", {"device_memory": "auto"}, {"device_memory"}),
    ("llama", "quest", {"device_memory": "auto"}, {"device_memory"}),
    ("olmo3", "quest", {"dense_layers": 1}, {"dense_layers"}),
    ("olmo3", "quest", {"dense_layers": 2}, set()),
    ("gemma3n", "quest", {"sparse_queries": 4}, {"sparse_queries"}),
]


@pytest.mark.parametrize(("architecture", "method", "given", "expected"), NOTHING)
def test_what_changes_nothing_is_told(
    architecture: str, method: str, given: dict[str, Any], expected: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvthaw"):
        found = Cache(build(architecture), method, **given).stats().no_effect
    assert set(found) == expected
    assert all(any(name in message and why in message for message in caplog.messages) for name, why in found.items())


def test_rows_of_8_bits_are_refused_where_no_rows_are_stored() -> None:
    model = build("llama")
    for given in ({"method": "full", "kv_dtype": "fp8"}, {"method": "full:kv_dtype=fp8"}):
        with pytest.raises(ConfigError, match=r"kv_dtype is 'fp8'.*full.*None"):
            Cache(model, **given)
    assert Cache(model, "quest", budget=32, kv_dtype="fp8").fork("full").stats().kv_dtype is None


def test_auto_says_that_full_attention_has_no_rows_of_8_bits() -> None:
    model = build("llama")
    with kvthaw.attach(model, "auto", kv_dtype="fp8", full_below=60, budget=32) as handle:
        model.generate(prompt(1, 50), max_new_tokens=2, do_sample=False)
        full = handle.stats()
        model.generate(prompt(1, 50), max_new_tokens=14, do_sample=False)
        sparse = handle.stats()
    assert (full.method, full.kv_dtype, full.kv_dense_bytes) == ("full", None, 2 * 51 * 2 * 2 * 16 * 4)
    assert "fp8" in full.reason
    assert (sparse.method, sparse.kv_dtype) == ("icecache-digest", "fp8")
    assert "fp8" in str(sparse)
