"""kvthaw plan's numbers, against what was measured on GPUs."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw import Cache, ConfigError
from kvthaw.bench.forecast import Forecast, Forecaster
from kvthaw.bench.gpus import GPUS, Machine, find_gpu, known_gpu
from kvthaw.bench.shapes import config
from kvthaw.config import CacheConfig
from kvthaw.methods.auto import BEST
from zoo import build

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "decode.jsonl"
GIB = 1 << 30


def measured() -> list[dict[str, Any]]:
    """Captured steps of today's tables, in which layers share no rows: of each method, GPU, alone or in a batch the longest, and of
    these the largest."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    found = {}
    for line in sorted(lines, key=lambda line: (line["setting"]["length"], line["setting"]["batch"])):
        one = line["setting"]
        todays = line["about"]["commit"] in ("6d49fb0", "aa0aadc", "0415dbb", "82c856d", "3e0cd90")
        if todays and one["steps"] == "captured" and not one["shared"]:
            found[one["device"], one["method"], one["batch"] > 1] = line
    return list(found.values())


def scripted(setting: dict[str, Any], told: Forecast) -> int:
    """Bytes that a benchmark's script holds on the device: the rows of 128 steps, of 8 KV heads and 30 layers."""
    if setting["hits"] is None or told.needs.plan is None:
        return 0
    rows = told.needs.plan.rows
    return int(4 * setting["batch"] * 8 * 30 * (rows + 127 * round((1 - setting["hits"]) * rows)))


@functools.cache
def on(gpu: str | None, *, memory: float | None = None, shape: str = "llama-3.1-8b", **asked: Any) -> Forecaster:
    known = None if gpu is None else GPUS[gpu]
    machine = Machine(gpu=known, gpu_memory=None if memory is None else int(memory * GIB), host_memory=asked.pop("host", None))
    settings, others = CacheConfig.split(asked)
    return Forecaster(config(shape), torch.bfloat16, machine, settings, **others)


def test_forecasts_are_near_what_was_measured() -> None:
    lines, made = measured(), dict[str, Forecaster]()
    assert len(lines) > 20
    for line in lines:
        setting = line["setting"]
        settings, _ = CacheConfig.split(setting)
        sizes = {part: setting[part] for part in ("batch", "new_tokens")}
        gpu, key = known_gpu(setting["device"]), f"{setting['device']} {sizes} {settings}"
        assert gpu is not None
        if key not in made:
            made[key] = Forecaster(config(setting["shape"]), torch.bfloat16, Machine(gpu=gpu), settings, **sizes)
        forecaster = made[key]
        told = forecaster.forecast(re.sub("^pariskv-plus", "pariskv-plus:code_bits=4", setting["method"]), setting["length"])
        slots = setting["batch"] * told.needs.searching * told.needs.capacity if not told.needs.host_index else 0
        more = 16 * slots  # of 8 heads; slots had 32 bits
        held = sum(line[part] for part in ("kv_device_bytes", "index_device_bytes", "kv_dense_bytes")) - more
        assert told.needs.device == pytest.approx(held, rel=0.065), setting  # dense layers have room for a sixteenth more
        assert told.needs.index == pytest.approx(line["index_device_bytes"] - more, rel=0.02, abs=1e5), setting
        assert forecaster.weights == line["weight_bytes"]
        peak = line["peak_device_bytes"] - scripted(setting, told) - more
        assert forecaster.weights + told.needs.device == pytest.approx(peak, rel=0.05), setting
        if (
            setting["batch"] == 1 and setting["method"] != "streaming"
        ):  # sequences of a batch shared rows; streaming stored none
            block = 30 * 4096 * 1024
            assert told.needs.rows == pytest.approx(line["kv_host_bytes"], rel=0.05, abs=1.1 * block), setting
        if line["index_host_bytes"] and not setting["method"].startswith("icecache-digest"):  # whose trees were smaller then
            assert told.needs.host_index == pytest.approx(line["index_host_bytes"], rel=0.05), setting


def test_forecast_times_are_near_what_was_measured() -> None:
    """Of the newest steps, to which the constants were fitted."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines = [line for line in lines if line["about"]["commit"] == "f7a79611"]
    assert len(lines) == 15
    for line in lines:
        setting = line["setting"]
        settings, _ = CacheConfig.split(setting)
        forecaster = Forecaster(
            config(setting["shape"]), torch.bfloat16, Machine(gpu=GPUS["H200"]), settings, new_tokens=setting["new_tokens"]
        )
        told = forecaster.forecast(setting["method"], setting["length"])
        step = told.step_no_hits_s if setting["hits"] == 0 else told.step_s
        assert step == pytest.approx(line["tpot_s"], rel=0.1), setting


def test_auto_is_what_a_cache_would_choose() -> None:
    short, long = (on("H100", memory=80).forecast("auto", length) for length in (8192, 65536))
    assert (short.in_force, long.in_force) == ("full", "thaw")
    assert "35,700" in long.needs.reason
    small = on("H100", memory=21).forecast("auto", 30_000)
    assert small.in_force == "thaw", "full attention is the faster way, but does not fit"
    cpu = Forecaster(config("tiny"), torch.float32, Machine(cpu=True)).forecast("auto", 10_000)
    assert (cpu.in_force, cpu.fits, cpu.step_s) == ("icecache-digest", None, None)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b"])
@pytest.mark.parametrize("weights", [None, 4.5], ids=["bfloat16", "four bits"])
def test_plan_and_a_cache_agree_about_a_card_of_24_gb(
    shape: str, weights: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 128k tokens; the cache is made as `attach` makes it, with the memory that plan leaves to it."""
    planned = on(None, memory=24, shape=shape, weights=None if weights is None else int(weights * GIB))
    told, room = planned.forecast("auto", 131_072), planned.room
    monkeypatch.setitem(BEST, "cpu", BEST["cuda"])  # the meta device stands for the card
    monkeypatch.setattr("kvthaw.engine.hf.dry_run.available_host_memory", lambda ranks: None)
    cache = Cache(planned.model, device_memory=room, sized_for=(1, 131_072, planned.new_tokens))
    assert told.fits
    assert cache.settings.method.name == told.in_force
    needs = Cache(planned.model, told.in_force, device_memory=room).needs(1, 131_072, planned.new_tokens, pinned=True)
    assert (needs.device, needs.host) == (told.needs.device, told.needs.host)
    assert needs.device <= (room or 0)


@pytest.mark.parametrize("memory", [18, 20, 22.4, 24])
def test_auto_fits_where_any_of_its_methods_does(memory: float) -> None:
    told = {name: on(None, memory=memory).forecast(name, 131_072) for name in ("auto", *BEST["cuda"].methods)}
    auto = told.pop("auto")
    fitting = [name for name, one in told.items() if one.fits]
    assert auto.fits is bool(fitting)
    if fitting:
        assert auto.in_force == fitting[0]
    assert ("thaw would need" in auto.needs.reason) == (auto.in_force != "thaw")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"memory": 24, "host": 12 * GIB}, ("a prompt of at most", "--kv-dtype fp8", "weights of 8 bits")),
        ({"memory": 18}, ("weights of 8 bits",)),
        ({"memory": 7}, ("weights of 4 bits, --weights 4.2GiB, and a prompt of at most",)),
        ({"memory": 2}, ()),
    ],
    ids=str,
)
def test_what_would_fit_was_tried(asked: dict[str, Any], words: tuple[str, ...]) -> None:
    said = on(None, **asked).would_fit("auto", 131_072)
    assert len(said) == len(words), said
    assert all(one.startswith(word) for one, word in zip(said, words, strict=True)), said


def test_fewer_sequences_may_fit() -> None:
    (said,) = [one for one in on(None, memory=24, batch=8).would_fit("auto", 131_072) if "--batch" in one]
    most = int(said.removeprefix("--batch "))
    assert on(None, memory=24, batch=most).forecast("auto", 131_072).fits
    assert not on(None, memory=24, batch=most + 1).forecast("auto", 131_072).fits


@pytest.mark.parametrize("method", ["auto", "full", "clusterkv-plus"])
def test_the_longest_prompt_is_the_longest_that_fits(method: str) -> None:
    def forecast(length: int) -> Forecast:
        return on(None, memory=8, host=8 * GIB, shape="llama-3.2-1b").forecast(method, length)

    longest = forecast(4096).longest
    assert longest is not None
    assert longest > 4096
    assert forecast(longest).fits
    assert not forecast(longest + 1024).fits


def test_a_method_may_have_a_budget_of_its_own() -> None:
    forecaster = on("H100", budget=256, memory=80)
    plans = [forecaster.forecast(name, 65536).needs.plan for name in ("quest", "quest:budget=1024", "auto:retrieved=100")]
    assert [(plan.budget, plan.rows) for plan in plans if plan] == [(256, 224), (1024, 992), (152, 100)]


def test_a_model_that_is_larger_than_the_gpu_fits_with_no_prompt() -> None:
    told = on(None, memory=12).forecast("auto", 4096)
    assert (told.fits, told.longest) == (False, 0)


def test_without_a_gpu_weights_and_all_of_the_cache_take_host_memory() -> None:
    asked: dict[str, Any] = {"config": config("llama-3.1-8b"), "dtype": torch.bfloat16}
    needs = Forecaster(**asked, machine=Machine(cpu=True)).forecast("quest", 8192).needs
    weights, all_kv = 16_060_522_496, needs.device + needs.host
    for host, fits in ((weights + all_kv, True), (weights + all_kv - 1, False), (all_kv, False)):
        assert Forecaster(**asked, machine=Machine(cpu=True, host_memory=host)).forecast("quest", 8192).fits is fits


def test_rows_go_to_the_device_while_there_is_room() -> None:
    forecaster = on("H100", memory=40, device_memory="auto")
    some = forecaster.forecast("clusterkv-plus", 262_144).needs
    assert some.blocks
    assert some.rows
    assert forecaster.room is not None
    assert forecaster.room - 200 * (1 << 20) < some.device <= forecaster.room
    assert on("H100", memory=40).forecast("clusterkv-plus", 262_144).needs.blocks == 0


def test_rows_of_eight_bits_are_page_locked_in_half_the_memory() -> None:
    """In whole powers of two, as torch page-locks memory: blocks are as large as fits one."""
    plain, small = (on("H100", kv_dtype=dtype).forecast("clusterkv-plus", 65536).needs for dtype in (None, "fp8"))
    assert 0.5 < small.rows / plain.rows < 0.54
    assert small.rows % (1 << 20) == 0


def test_a_step_reads_the_experts_that_it_uses() -> None:
    moe = build("qwen3_moe").config
    alone, many = (Forecaster(moe, torch.float32, Machine(gpu=GPUS["H100"]), batch=batch) for batch in (1, 8))
    told = [one.forecast("full", 200).step_s for one in (alone, many)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0] < told[1]
    assert Forecaster(moe, torch.float32, Machine(), weights=1000).weights == 1000


def test_times_are_estimated_where_nothing_was_measured() -> None:
    assert on("H200").forecast("pariskv-plus", 65536).basis == "expected"
    assert on("RTX-4090").forecast("pariskv-plus", 65536).basis == "estimated"
    assert on("H100").forecast("quest", 65536).basis is None
    assert find_gpu("rtx-4090") is GPUS["RTX-4090"]
    assert known_gpu("NVIDIA GTX 980") is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"length is 4,194,304 and new_tokens is .* positions end at"):
        on("H100").forecast("full", 1 << 22)
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        find_gpu("H10")
