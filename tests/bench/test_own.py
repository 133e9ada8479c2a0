"""Timing a model of one's own: the same prompt and steps for every cache, and what the times say one should do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw import CacheError
from kvthaw.bench import own
from kvthaw.bench.own import OwnBench, Reading, advice
from kvthaw.engine.hf import Cache
from kvthaw.evaluate.results import Record, ResultsFile
from zoo import build

LIMIT: dict[str, Any] = {"budget": 64, "retrieved": None, "dense_layers": 0, "new_tokens": 4, "seed": 0, "device": "cpu"}


def timed(loaded: tuple[Any, Any], *methods: str, notes: list[str] | None = None, out: Path | None = None) -> list[Record]:
    reading = Reading(*loaded, "mine", "Alice was beginning to get very tired. " * 20)
    bench = OwnBench(reading, ResultsFile(out), note=(notes if notes is not None else []).append)
    records = bench.run(reading.grid(methods, [160], [2], ["eager", "captured"], **LIMIT))
    bench.judge()
    return records


def test_every_cache_takes_the_same_steps(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    theirs, full, quest = timed(loaded, "quest", "full", out=tmp_path / "out.jsonl")
    assert [one["method"] for one in (theirs, full, quest)] == ["hf-dynamic", "full", "quest"]
    assert (theirs["agreement"], full["agreement"]) == (1, 1)
    assert 0 <= quest["agreement"] <= 1
    assert [len(row) for row in quest["chosen"]] == [4, 4]
    assert full["chosen"] == theirs["chosen"]
    lengths = {one["full_kv_bytes"] for one in (theirs, full, quest)}
    assert len(lengths) == 1
    again = timed(loaded, "oracle", out=tmp_path / "out.jsonl")
    assert again[0] == theirs
    assert again[2]["agreement"] is not None


def test_full_attention_holds_all_of_its_kv_beside_sliding_windows(loaded: tuple[Any, Any]) -> None:
    model = build("gemma3", vocab_size=loaded[0].config.vocab_size)
    theirs, full = timed((model, loaded[1]))
    assert theirs["share_with_dense"] == full["share_with_dense"] == 1


def test_an_exact_cache_that_chooses_otherwise_fails(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    take = own.take

    def wrong(model: Any, cache: Any, *args: Any, **given: Any) -> Any:
        hook = model.lm_head.register_forward_hook(lambda *each: -each[2] if isinstance(cache, Cache) else None)
        try:
            return take(model, cache, *args, **given)
        finally:
            hook.remove()

    monkeypatch.setattr("kvthaw.bench.decode.take", wrong)
    with pytest.raises(CacheError, match="full chose 0% of the tokens"):
        timed(loaded)


def test_what_does_not_fit_is_noted_and_the_others_are_timed(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = OwnBench.cache

    def cache(self: OwnBench, one: Any) -> Any:
        if one.method in ("hf-dynamic", "full"):
            raise torch.OutOfMemoryError
        return made(self, one)

    monkeypatch.setattr(OwnBench, "cache", cache)
    notes: list[str] = []
    (quest,) = timed(loaded, "quest", notes=notes)
    assert quest["agreement"] is None
    assert [note.partition(":")[0] for note in notes] == ["does not fit"] * 2


def record(method: str, tpot: float, agreement: float | None = 1.0, **asked: Any) -> Record:
    setting = {"method": method, "length": 32768, "batch": 1, "device": "GPU", "budget": None, "retrieved": None, **asked}
    return Record(setting, {"tpot_s": tpot / 1000, "agreement": agreement, "share_with_dense": 0.07})


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([("hf-dynamic", 10), ("full", 9.9), ("quest", 12)], "At 32k tokens on GPU full attention fits and is fastest, 9.9 ms"),
        ([("hf-dynamic", 10), ("full", 9.9), ("quest", 9.8)], "full attention fits and is as fast as any, 9.9 ms"),
        ([("hf-dynamic", 10), ("full", 5)], 'fastest through kvthaw.attach(model, "full"), 5 ms a token: keep it'),
        ([("hf-dynamic", 10), ("quest", 5, 0.95)], 'same token in 95% of steps: use kvthaw.attach(model, "quest") if'),
        ([("hf-dynamic", 10), ("quest", 5, 0.5)], "keep full attention, or raise the budget"),
        ([("hf-dynamic", 10), ("quest", 5, 0.5), ("oracle", 7, 0.9)], 'use kvthaw.attach(model, "oracle")'),
        ([("hf-offloaded", 100), ("quest", 5)], "quest takes 5 ms a token, picks the same token in 100% of steps, transformers'"),
        ([("hf-offloaded", 100)], "transformers' offloaded cache takes 100 ms a token: use it"),
        ([("quest", 5, None)], 'full attention does not fit; quest takes 5 ms a token: use kvthaw.attach(model, "quest")'),
    ],
)  # fmt: skip
def test_a_sentence_says_what_to_do(records: list[tuple[Any, ...]], words: str) -> None:
    assert words in advice([record(*one) for one in records])
