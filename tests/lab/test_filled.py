"""The decode benchmark on caches that were not prefilled, and with rows by a script."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw import CacheError, ConfigError
from lab import filled, room
from lab.filled import FilledBench, check_profiled, hits_as_asked
from timed import measured, settings

pytestmark = pytest.mark.usefixtures("small")


def one(*methods: str, **asked: Any) -> Any:
    (record,) = measured(*methods, of=FilledBench, **asked)
    return record


@pytest.mark.parametrize("method", ["icecache-digest", "clusterkv:keep=0"])
def test_hits_are_those_asked_for(method: str) -> None:
    record = one(method, hits=0.7, prompt="filled", batches=[2])
    assert record["hit_rate"] == pytest.approx(0.0 if method.endswith("keep=0") else 0.7, abs=0.02)
    assert record["ttft_s"] is None
    assert record["fill_s"] > 0


def test_a_filled_cache_shares_rows_and_layers_on_the_host() -> None:
    alone, two, three = (
        one("quest:dense_layers=0", prompt="filled", lengths=[1024], batches=[batch], shared=shared)
        for batch, shared in ((1, False), (2, False), (2, True))
    )
    assert two["kv_frozen_bytes"] == pytest.approx(2 * alone["kv_frozen_bytes"])
    assert three["kv_frozen_bytes"] == two["kv_frozen_bytes"]
    block_size = 1024 * 2 * 128
    new = (two["kv_host_bytes"] - alone["kv_host_bytes"]) // block_size  # what came since is each row's own
    assert alone["kv_host_bytes"] == 2 * block_size + new * block_size
    assert three["kv_host_bytes"] == two["kv_host_bytes"] - block_size


def test_a_cache_that_is_filled_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled.fill

    def wrong(cache: Any, tokens: Any, **given: Any) -> None:
        whole(cache, lambda number: tokens(1 - number), **given)

    monkeypatch.setattr(filled, "fill", wrong)
    with pytest.raises(CacheError, match="differs from"):
        one("quest", prompt="filled")
    assert measured("hf-dynamic", of=FilledBench, prompt="filled") == []


def test_hits_that_did_not_come_are_an_error() -> None:
    (setting,) = settings("quest", hits=0.7)
    hits_as_asked(setting, 0.71)
    for found in (0.6, None):
        with pytest.raises(CacheError, match=r"hits is 0\.7"):
            hits_as_asked(setting, found)


def test_what_does_not_fit_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 141 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    gpu, host = torch.device("cuda"), 120 << 30
    wanted: dict[str, Any] = {"shape": "llama-3.1-8b", "prompt": "filled", "steps": ["captured"], "device": "gpu"}
    for method, asked, words in (
        ("full", {"lengths": [1 << 20]}, "full at llama-3.1-8b's shape needs .* bytes of the device"),
        ("full", {"lengths": [131072], "batches": [8]}, "batch 8, .* bytes of the device"),
        ("quest", {"lengths": [1 << 20], "retrieved": 100}, "more host memory than there is"),
    ):
        with pytest.raises(ConfigError, match=words):
            room.check(*settings(method, **wanted, **asked), gpu, torch.bfloat16, host)
    fitting: tuple[tuple[str, dict[str, Any]], ...] = (
        ("full", {"lengths": [524288]}),
        ("pariskv", {"lengths": [131072], "batches": [16], "shared": True}),
        ("pariskv", {"lengths": [1 << 20], "shared": True}),
    )
    for method, asked in fitting:
        room.check(*settings(method, **wanted, **asked), gpu, torch.bfloat16, host)


def test_need_is_near_what_is_held() -> None:
    record = one("quest:dense_layers=1", lengths=[1024], prompt="filled")
    (setting,) = settings("quest:dense_layers=1", lengths=[1024], prompt="filled")
    need = room.need(setting, torch.float32)
    assert need.weights == record["weight_bytes"]
    assert need.host == pytest.approx(record["kv_frozen_bytes"], rel=0.05)
    held = record["kv_device_bytes"] + record["kv_dense_bytes"] + record["index_device_bytes"]
    assert need.device > need.weights + held


def test_a_prompt_beside_what_the_hardware_allows() -> None:
    """128k tokens of an 8B model: 1.83 PFLOP of products and 4.5 of attention."""
    from kvthaw.evaluate.results import Record

    setting = {"shape": "llama-3.1-8b", "length": 131072, "chunk": 16384, "layers": None, "dense_layers": 0}
    least = 1.83e15 / 795e12 + 4.504e15 / 660e12
    assert room.over_floor(Record(setting, {"indexed_s": 2 * least})) == pytest.approx(2, rel=2e-3)
    assert room.over_floor(Record(setting, {"indexed_s": None})) is None


def test_nothing_is_timed_after_a_profile() -> None:
    eager, captured, _, other = settings("full", "quest", steps=["eager", "captured"])
    check_profiled([eager, captured])
    with pytest.raises(ConfigError, match="profile one setting in a run"):
        check_profiled([captured, other])
