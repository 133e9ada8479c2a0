"""The decode benchmark from end to end, on a model that is tiny."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw import CacheError, ConfigError
from kvthaw.bench import decode, steps
from kvthaw.bench.steps import WARM, Counts, Steps, most_warm, take, warm_steps
from kvthaw.engine.hf import Cache
from kvthaw.evaluate.results import Record, ResultsFile
from lab.bench import shaped
from lab.bench.shaped import ShapeBench
from lab.bench.shapes import build, random_tokens
from timed import Unchecked, measured, settings
from zoo import prompt

pytestmark = pytest.mark.usefixtures("small")


def test_a_record_says_everything_of_a_run() -> None:
    theirs, full, quest = measured("hf-dynamic", "full", "quest:dense_layers=1", batches=[2])
    row = 2 * 16 * 4  # K and V of one head in float32
    for one in (theirs, full, quest):
        assert one["about"]["commit"] == "abc"
        assert 0 < one["ttft_s"] < one["tt2t_s"]
        assert one["cold_ttft_s"] > 0
        assert 0 < one["itl_p50_s"] <= one["itl_p95_s"] <= one["itl_p99_s"]
        assert one["elapsed_s"]["20"] == pytest.approx(20 * one["tpot_s"])
        assert Record.from_json(one.to_json()) == one
    tokens = quest["full_kv_bytes"] // (2 * 2 * 2 * row)  # rows of the batch, layers, heads
    assert 160 + 20 < tokens < 160 + 20 + most_warm(torch.device("cpu")) + 20
    assert (full["kv_dense_bytes"], full["share_of_full"], full["share_with_dense"]) == (full["full_kv_bytes"], None, 1.0)
    assert quest["kv_dense_bytes"] == quest["full_kv_bytes"] // 2
    assert quest["kv_device_bytes"] == 64 * 2 * 2 * row
    held = quest["kv_device_bytes"] + quest["index_device_bytes"]
    assert quest["share_of_full"] == pytest.approx(held / (quest["full_kv_bytes"] / 2))
    assert quest["kv_frozen_bytes"] <= quest["kv_host_bytes"] == 2 * 2 * 1024 * row
    assert (quest["budget"], quest["dense_layers"], quest["attended_max"]) == (64, 1, 64)
    wanted = quest["retrieved"] * 2 * 2 * row
    assert quest["fetched_bytes"] == pytest.approx((1 - quest["hit_rate"]) * wanted, rel=0.1)
    assert quest["bus_bytes"] == quest["fetched_bytes"] + quest["stored_bytes"]


def test_steps_alone_come_after_one_prompt() -> None:
    (one,) = measured("streaming", prompt="once", new_tokens=2)
    assert (one["ttft_s"], one["tt2t_s"]) == (None, None)
    assert one["cold_ttft_s"] > 0
    assert one["tpot_s"] > 0


def test_transformers_caches_attend_by_transformers_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    timed = decode.take

    def noted(model: Any, *args: Any, **given: Any) -> Steps:
        seen.append(model.config._attn_implementation)
        return timed(model, *args, **given)

    monkeypatch.setattr(decode, "take", noted)
    measured("quest", "hf-dynamic", of=Unchecked, new_tokens=2)
    assert seen[2] == "kvthaw"
    assert seen[-1] == "sdpa"


def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    first = measured("full", out=out, of=Unchecked, new_tokens=2)
    monkeypatch.setattr(shaped, "build", lambda *_, **__: pytest.fail("built a model for nothing"))
    assert measured("full", out=out, new_tokens=2) == first
    assert len(out.read_text().splitlines()) == 1
    monkeypatch.undo()
    assert list(ResultsFile(out)) == first


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    short: dict[str, Any] = {"out": out, "of": Unchecked, "new_tokens": 2}
    measured("full", **short)
    out.write_text(out.read_text() + '{"setting": {"sha')
    said: list[Record] = []
    measured("full", "quest", how={"say": said.append}, **short)
    assert [one["method"] for one in said] == ["full", "quest"]
    assert [json.loads(text)["setting"]["method"] for text in out.read_text().splitlines()] == ["full", "quest"]


def test_a_wrong_method_is_found_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.index.bounds import BoundIndex

    select = BoundIndex.select
    monkeypatch.setattr(BoundIndex, "select", lambda self, query, budget: select(self, query, max(1, budget // 8)))
    said: list[Record] = []
    notes: list[str] = []
    differs = "arkvale, eager, differs from transformers at a budget above the length"
    with pytest.raises(CacheError, match=f"2 settings failed: arkvale, 160, eager, budget 64: {differs}"):
        measured("arkvale", "quest", "full", how={"say": said.append, "note": notes.append}, new_tokens=2)
    assert [one["method"] for one in said] == ["full"]
    assert [note.partition(",")[0] for note in notes if note.startswith("failed")] == ["failed: arkvale", "failed: quest"]


def test_a_cache_of_transformers_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(decode, "hf_cache", lambda *_: [])
    assert measured("hf-dynamic", "full", how={"note": notes.append})[0]["method"] == "full"
    assert "transformers' own cache fails" in notes[0]


def test_logits_that_are_not_finite_are_an_error() -> None:
    from transformers import DynamicCache

    model = build("tiny", torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(CacheError, match="not finite"):
        take(model, DynamicCache(config=model.config), random_tokens(model, 1, 0), 2, warm=0, capture=False)


def test_steps_in_numbers() -> None:
    gaps = tuple(float(n) for n in range(1, 101))
    steps = Steps(gaps, (None, None), None)  # type: ignore[arg-type]
    assert (steps.mean, steps.quantile(0.5), steps.quantile(0.95)) == (50.5, 51.0, 96.0)
    assert steps.elapsed() == {"16": 136.0, "32": 528.0, "64": 2080.0, "100": 5050.0}


def test_a_record_has_its_steps_mean_median_and_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = (1.0, 2.0, 3.0, 10.0, 100.0)
    monkeypatch.setattr(decode, "take", lambda *_, **__: Steps(gaps, (Counts(), Counts()), None))
    (one,) = measured("full", of=Unchecked, lengths=[16], batches=[2])
    assert (one["tpot_s"], one["itl_p50_s"], one["itl_p95_s"]) == (23.2, 3.0, 100.0)
    assert one["tokens_per_s"] == 2 / 23.2


def test_only_what_the_machine_can_do() -> None:
    with pytest.raises(ConfigError, match="on cpu none of these is possible: full, 160, captured"):
        measured("full", steps=["captured"])
    notes: list[str] = []
    found = measured("full", "hf-offloaded", steps=["eager", "captured"], new_tokens=2, how={"note": notes.append})
    assert [one["method"] for one in found] == ["full"]
    assert len(notes) == 3
    assert all("not possible on cpu" in note for note in notes)


@pytest.mark.gpu
def test_gpu_captured_steps_are_checked_and_timed() -> None:
    asked = ("full", "quest", "icecache-digest")
    bench = ShapeBench(ResultsFile())
    found = bench.run(settings(*asked, device="gpu", steps=["eager", "captured"]))
    ways = [(name, way) for name in asked for way in ("eager", "captured")]
    assert [(one["method"], one["steps"]) for one in found] == ways
    assert all(one["captures"] == 1 for one in found if one["steps"] != "eager")


def prefilled(method: str, length: int, **sizes: Any) -> tuple[Any, Cache]:
    model = build("tiny", torch.device("cpu"))
    cache = Cache(model, method, **sizes)
    with torch.no_grad():
        model(torch.randint(0, 128, (1, length)), past_key_values=cache)
    return model, cache


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("quest", {"budget": 64}),
        ("full", {}),
        ("pariskv", {"retrieved": 20}),
        ("streaming", {"budget": 64}),
        ("icecache-reuse", {"budget": 64}),
    ],
)
def test_steps_that_do_not_count_reach_the_first_tokens_that_leave(method: str, sizes: dict[str, int]) -> None:
    """If they leave soon: that, too, compiles kernels."""
    model, cache = prefilled(method, 1000, **sizes, dense_layers=0)
    warm, rings = warm_steps(cache), [kv.indexed(0) for kv in cache.kv.offloaded]
    assert WARM <= warm <= most_warm(torch.device("cpu"))
    take(model, cache, random_tokens(model, 1, 0), 1, warm=warm, capture=False)
    if method in ("quest", "icecache-reuse"):
        assert all(kv.indexed(0) > before for kv, before in zip(cache.kv.offloaded, rings, strict=True))
    else:
        assert warm == WARM


def test_the_time_that_a_compilation_takes_does_not_end_the_steps_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = prefilled("full", 50)
    taken, clock = list[int](), [0.0]

    def slow(*_: Any) -> None:
        clock[0] += 0.01 if taken else 0.3
        taken.append(1)

    model.register_forward_hook(slow)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(steps, "_PATIENCE", 0.25)
    take(model, cache, random_tokens(model, 1, 0), 1, warm=WARM + 3, capture=False)
    assert len(taken) == WARM + 3 + 1
    monkeypatch.setattr(steps, "_PATIENCE", 0.0)
    take(model, cache, random_tokens(model, 1, 0), 1, warm=WARM + 3, capture=False)
    assert len(taken) == 2 * WARM + 3 + 2


def test_counts_are_of_all_sequences_and_layers(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64, dense_layers=0)
    with torch.no_grad():
        llama(prompt(2, 100), past_key_values=cache)
    stored = [layer.store.length(seq) for layer in cache.kv.offloaded for seq in range(2)]
    assert min(stored) > 0
    assert Counts.of(cache).stored_bytes == sum(stored) * 2 * (2 * 16 * 4)  # heads, K and V in float32
