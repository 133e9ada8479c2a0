"""The decode benchmark from end to end, on a model that is tiny."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw import CacheError, ConfigError, HostMemoryError
from kvthaw.bench import check, decode, room, steps
from kvthaw.bench.asked import Decode
from kvthaw.bench.card import bandwidths
from kvthaw.bench.fill import drawn, fill
from kvthaw.bench.lines import Line, Lines
from kvthaw.bench.settings import grid
from kvthaw.bench.shapes import SHAPES, build
from kvthaw.bench.steps import WARM, Decoder, Steps, most_warm, random_tokens, take, warm_steps
from kvthaw.engine.hf import Cache

pytestmark = pytest.mark.usefixtures("small")

SMALL: dict[str, Any] = {"length": (160,), "budget": 64, "new_tokens": 20, "commit": "abc"}


def measured(**asked: Any) -> list[Line]:
    return decode.main(Decode(**{**SMALL, **asked}))


def test_a_line_says_everything_of_a_run() -> None:
    theirs, full, quest = measured(method=("hf-dynamic", "full", "quest:dense_layers=1"), batch=(2,))
    row = 2 * 16 * 4  # K and V of one head in float32
    for line in (theirs, full, quest):
        assert line.about["commit"] == "abc"
        assert line.ttft_s is not None
        assert line.tt2t_s is not None
        assert line.cold_ttft_s is not None
        assert 0 < line.ttft_s < line.tt2t_s
        assert 0 < line.itl_p50_s <= line.itl_p95_s
        assert line.tokens_per_s == pytest.approx(2 / line.tpot_s)
        assert line.elapsed_s["20"] == pytest.approx(20 * line.tpot_s)
        assert line.floor_ratio == pytest.approx(line.tpot_s / line.floor_s)
        assert line.floor_bus_s is None  # there is no bus on a CPU
    tokens = quest.full_kv_bytes // (2 * 2 * 2 * row)  # rows of the batch, layers, heads
    assert 160 + 20 < tokens < 160 + 20 + most_warm(torch.device("cpu")) + 20
    assert (full.kv_dense_bytes, full.share_of_full, full.share_with_dense) == (full.full_kv_bytes, None, 1.0)
    assert quest.kv_dense_bytes == quest.full_kv_bytes // 2
    assert quest.kv_device_bytes == 64 * 2 * 2 * row
    assert quest.index_device_bytes > 0
    assert quest.share_of_full == pytest.approx((quest.kv_device_bytes + quest.index_device_bytes) / (quest.full_kv_bytes / 2))
    assert quest.kv_frozen_bytes <= quest.kv_host_bytes == 2 * 2 * 1024 * row
    assert (quest.budget, quest.dense_layers, quest.attended_max) == (64, 1, 64)
    assert quest.hit_rate is not None
    assert quest.retrieved is not None
    wanted = quest.retrieved * 2 * 2 * row
    assert quest.fetched_bytes == pytest.approx((1 - quest.hit_rate) * wanted, rel=0.1)
    assert quest.bus_bytes == quest.fetched_bytes + quest.stored_bytes
    assert set(quest.parts_s) == {"query", "residency", "fetch", "attention", "model"}
    assert min(quest.parts_s.values()) > 0
    assert set(full.parts_s) == {"attention", "model"}


def test_transformers_caches_attend_by_transformers_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    prefilled = decode.take

    def noted(decoder: Decoder, *args: Any, **given: Any) -> Steps:
        seen.append(decoder.model.config._attn_implementation)
        return prefilled(decoder, *args, **given)

    monkeypatch.setattr(decode, "take", noted)
    measured(method=("quest", "hf-dynamic"), prompt="filled", new_tokens=8)
    assert seen == ["kvthaw", "sdpa"]


def test_a_line_survives_its_json() -> None:
    (line,) = measured(method=("full",))
    assert Line.from_json(line.to_json()) == line


def test_the_floor_reads_weights_and_what_is_attended() -> None:
    (line,) = measured(method=("quest:dense_layers=0",))
    model = build("tiny", torch.device("cpu"))
    weights = sum(p.numel() * 4 for p in model.parameters())  # the embeddings are the output's, and read whole
    assert line.weight_bytes == weights
    assert line.attended_mean is not None
    read = weights + line.attended_mean * 2 * 2 * (2 * 16 * 4)
    assert line.floor_device_s == pytest.approx(read / line.about["device_bytes_per_s"])


@pytest.mark.parametrize("method", ["icecache", "clusterkv:keep=0"])
def test_hits_are_those_asked_for(method: str) -> None:
    (line,) = measured(method=(method,), hits=0.7, prompt="filled", batch=(2,))
    assert line.hit_rate == pytest.approx(0.0 if method.endswith("keep=0") else 0.7, abs=0.02)
    assert line.ttft_s is None
    assert line.fill_s is not None


def test_a_filled_cache_shares_rows_and_layers_on_the_host() -> None:
    one, two, three = (
        measured(method=("quest:dense_layers=0",), prompt="filled", length=(1024,), batch=(batch,), share_host=shared)[0]
        for batch, shared in ((1, False), (2, False), (2, True))
    )
    assert two.kv_frozen_bytes == pytest.approx(2 * one.kv_frozen_bytes)
    assert three.kv_frozen_bytes == two.kv_frozen_bytes
    extent = 1024 * 2 * 128
    new = (two.kv_host_bytes - one.kv_host_bytes) // extent  # what came since is each row's own
    assert one.kv_host_bytes == 2 * extent + new * extent
    assert three.kv_host_bytes == two.kv_host_bytes - extent


def test_what_stands_in_the_file_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    first = measured(method=("full",), out=out)
    monkeypatch.setattr(decode, "build", lambda *_, **__: pytest.fail("built a model for nothing"))
    assert measured(method=("full",), out=out) == first
    assert len(out.read_text().splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setitem(SHAPES, "tiny", lambda: pytest.fail("not asked for"))
    assert list(Lines(out)) == first


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    measured(method=("full",), out=out)
    out.write_text(out.read_text() + '{"setting": {"sha')
    said: list[Line] = []
    decode.main(Decode(**{**SMALL, "method": ("full", "quest"), "out": out}), say=said.append)
    assert [line.setting.method for line in said] == ["full", "quest"]
    assert [json.loads(text)["setting"]["method"] for text in out.read_text().splitlines()] == ["full", "quest"]


def test_a_wrong_method_is_found_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.index.bounds import BoundIndex

    select = BoundIndex.select
    monkeypatch.setattr(BoundIndex, "select", lambda self, query, budget: select(self, query, max(1, budget // 8)))
    with pytest.raises(CacheError, match="arkvale, eager, differs from transformers at a budget above the length"):
        measured(method=("arkvale",))
    said: list[Line] = []
    notes: list[str] = []
    with pytest.raises(CacheError, match="2 settings failed: arkvale, 160, eager, budget 64: arkvale, eager, differs"):
        decode.main(Decode(**SMALL | {"method": ("arkvale", "quest", "full")}), say=said.append, note=notes.append)
    assert [line.setting.method for line in said] == ["full"]
    assert [note.partition(",")[0] for note in notes if note.startswith("failed")] == ["failed: arkvale", "failed: quest"]


def test_a_cache_that_is_filled_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check.fill

    def wrong(cache: Any, tokens: Any, **given: Any) -> None:
        whole(cache, lambda number: tokens(1 - number), **given)

    monkeypatch.setattr(check, "fill", wrong)
    for method in ("quest", "hf-dynamic"):
        with pytest.raises(CacheError, match="differs from"):
            measured(method=(method,), prompt="filled")


def test_hits_that_did_not_come_are_an_error() -> None:
    (one,) = grid(Decode(method=("quest",), hits=0.7, steps=("eager",)), "cpu")
    check.hits_as_asked(one, 0.71)
    for found in (0.6, None):
        with pytest.raises(CacheError, match=r"hits is 0\.7"):
            check.hits_as_asked(one, found)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = build("tiny", torch.device("cpu"))
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens = random_tokens(model, 1, 0)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
        with pytest.raises(CacheError, match="not finite"):
            take(Decoder(model, cache), tokens, 2, warm=0)


def test_steps_in_numbers() -> None:
    gaps = tuple(float(n) for n in range(1, 101))
    steps = Steps(gaps, (None, None), None)  # type: ignore[arg-type]
    assert (steps.mean, steps.quantile(0.5), steps.quantile(0.95)) == (50.5, 51.0, 96.0)
    assert steps.elapsed() == {"16": 136.0, "32": 528.0, "64": 2080.0, "100": 5050.0}


def test_only_what_the_machine_can_do() -> None:
    with pytest.raises(ConfigError, match="steps is captured; on cpu none of them is possible"):
        measured(method=("full",), steps=("captured",))
    with pytest.raises(ConfigError, match="none of them is possible with hf-offloaded"):
        measured(method=("hf-offloaded",))
    notes: list[str] = []
    wanted = Decode(**{**SMALL, "method": ("full", "hf-offloaded"), "steps": ("eager", "captured"), "new_tokens": 2})
    assert [line.setting.method for line in decode.main(wanted, note=notes.append)] == ["full"]
    assert notes == [
        "left out, not possible on cpu: captured steps of full, hf-offloaded",
        "left out, not possible on cpu: eager steps of hf-offloaded",
    ]


def test_what_does_not_fit_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "build", lambda *_, **__: pytest.fail("built a model"))
    with pytest.raises(ConfigError, match="length is 160 and batch 1, with which full at tiny's shape needs more host memory"):
        measured(method=("full",), host_bytes=1 << 20)

    class Card:
        total_memory = 141 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    gpu, host = torch.device("cuda"), 120 << 30
    for asked, words in (
        ({"method": ("full",), "length": (1 << 20,)}, "full at llama-3.1-8b's shape needs .* bytes of the device"),
        ({"method": ("full",), "length": (131072,), "batch": (8,)}, "batch 8, .* bytes of the device"),
        ({"method": ("quest",), "length": (1 << 20,), "retrieved": 100}, "more host memory than there is"),
    ):
        (one,) = grid(Decode(shape="llama-3.1-8b", prompt="filled", steps=("captured",), **asked), "gpu")
        with pytest.raises(ConfigError, match=words):
            room.check(one, gpu, torch.bfloat16, host)
    fitting: tuple[dict[str, Any], ...] = (
        {"method": ("full",), "length": (524288,)},
        {"method": ("pariskv",), "length": (131072,), "batch": (16,), "share_host": True},
        {"method": ("pariskv",), "length": (1 << 20,), "share_host": True},
    )
    for asked in fitting:
        (one,) = grid(Decode(shape="llama-3.1-8b", prompt="filled", steps=("captured",), **asked), "gpu")
        room.check(one, gpu, torch.bfloat16, host)
    assert issubclass(HostMemoryError, MemoryError)


def test_need_is_near_what_is_held() -> None:
    (line,) = measured(method=("quest:dense_layers=1",), length=(1024,), prompt="filled")
    need = room.need(line.setting, torch.float32)
    held = line.kv_device_bytes + line.kv_dense_bytes + line.index_device_bytes
    assert need.weights == line.weight_bytes
    assert need.host == pytest.approx(line.kv_frozen_bytes, rel=0.05)
    assert need.device > need.weights + held


def test_bandwidth_of_a_cpu() -> None:
    found = bandwidths(torch.device("cpu"))
    assert found["bus_bytes_per_s"] is None
    assert found["device_bytes_per_s"] is not None
    assert found["device_bytes_per_s"] > 1e8


@pytest.mark.gpu
def test_gpu_captured_steps_are_checked_and_timed() -> None:
    asked = ("full", "quest:hits=0.5", "icecache", "hf-offloaded")
    lines = measured(method=asked, steps=("eager", "captured", "compiled"))
    assert [(line.setting.method, line.setting.steps) for line in lines] == [
        *(("full", steps) for steps in ("eager", "captured", "compiled")),
        *(("quest", steps) for steps in ("eager", "captured", "compiled")),
        ("icecache", "eager"),
        ("hf-offloaded", "eager"),
    ]
    for line in lines:
        assert line.floor_bus_s is not None
        if line.setting.steps != "eager":
            assert line.captures == 1
    (line,) = measured(method=("quest",), steps=("captured",), profile=True)
    assert line.launches is not None
    assert line.parts_s["attention"] > 0


def test_nothing_is_timed_after_a_profile(tmp_path: Path) -> None:
    ways = grid(Decode(method=("full", "quest"), steps=("eager", "captured")), "cpu")
    eager, captured, quest, _ = ways
    known = Lines(tmp_path / "lines.jsonl")
    decode._check_profiled([(one, False) for one in ways], known)
    decode._check_profiled([(eager, True), (quest, True), (captured, True)], known)
    decode._check_profiled([(captured, True), (captured, True)], known)
    with pytest.raises(ConfigError, match=r"profile is on for .*full.* ask for one way"):
        decode._check_profiled([(captured, True), (quest, False)], known)


@pytest.mark.parametrize(("method", "sizes"), [("quest", {"budget": 64}), ("full", {}), ("pariskv", {"retrieved": 20})])
def test_steps_that_do_not_count_reach_the_first_tokens_that_leave(method: str, sizes: dict[str, int]) -> None:
    """If they leave soon: that, too, compiles kernels."""
    model = build("tiny", torch.device("cpu"))
    cache = Cache(model, method, **sizes, dense_layers=0)
    fill(cache, lambda layer: drawn(model, layer, 1000, 0))
    warm, rings = warm_steps(cache), [kv.indexed(0) for kv in cache.frozen_layers]
    assert WARM <= warm <= most_warm(torch.device("cpu"))
    with torch.no_grad():
        take(Decoder(model, cache), random_tokens(model, 1, 0), 1, warm=warm)
    if method == "quest":
        assert all(kv.indexed(0) > before for kv, before in zip(cache.frozen_layers, rings, strict=True))
    else:
        assert warm == WARM


def test_the_time_that_a_compilation_takes_does_not_end_the_steps_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = build("tiny", torch.device("cpu")), list[float]()

    class Compiles(Decoder):
        def logits(self, ids: torch.Tensor) -> torch.Tensor:
            if not taken:
                time.sleep(0.3)
            taken.append(time.perf_counter())
            return super().logits(ids)

    monkeypatch.setattr(steps, "_PATIENCE", 0.25)
    cache = Cache(model, "full")
    fill(cache, lambda layer: drawn(model, layer, 50, 0))
    with torch.no_grad():
        take(Compiles(model, cache), random_tokens(model, 1, 0), 1, warm=WARM + 3)
        assert len(taken) == WARM + 3 + 1
        monkeypatch.setattr(steps, "_PATIENCE", 0.0)
        take(Compiles(model, cache), random_tokens(model, 1, 0), 1, warm=WARM + 3)
    assert len(taken) == 2 * WARM + 3 + 2
