"""PRKV's automatic share over prompts: appendix G beside the command's lines, and lines that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvthaw.engine.hf import Cache
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import ResultsFile
from lab.passages import text_passage
from lab.shares import shares

HOW: dict[str, Any] = {"kinds": ("text",), "page": 8, "window": 16}


def test_the_share_is_the_papers_equation(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    (cell,) = shares(model, tokenizer, ResultsFile(), lengths=[300], rows=[64], **HOW)
    by_layer = {one["layer"]: one["share"] for one in cell["layers"]}
    prompt = text_passage(tokenizer, length=300, steps=1, seed=0).prompt
    cache = Cache(model, "full")
    prefill(model, cache, prompt)
    for layer in cache.kv.layers:
        queries, keys = layer.recent_queries[0][:, -16:].double(), layer.read(0, 0, 300 - 16)[:, :, 0].double()
        common = []
        for head, own in enumerate(queries):
            scores = own @ keys[head * keys.shape[0] // len(queries)].T
            first, last = (set(scores[i].topk(64).indices.tolist()) for i in (0, -1))
            common.append(len(first & last))
        assert by_layer[layer.number] == pytest.approx(8 * (sum(common) / len(common) // 8) / 64)
    assert cell["share"] == pytest.approx(sum(by_layer.values()) / len(by_layer))


def test_lines_are_kept_and_not_made_again(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    seen: list[int] = []
    loaded[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sizes: dict[str, Any] = {"lengths": [200, 300], "rows": [32, 64], **HOW}
    first = list(shares(*loaded, ResultsFile(out), **sizes))
    assert [(cell["length"], cell["rows"], cell["samples"]) for cell in first] == [
        (200, 32, 1),
        (200, 64, 1),
        (300, 32, 1),
        (300, 64, 1),
    ]
    assert sum(seen) == 500
    assert list(shares(*loaded, ResultsFile(out), **sizes)) == first
    assert sum(seen) == 500
    assert len(out.read_text().splitlines()) == 4
    record = first[0]
    assert record["least"] <= record["share"] <= record["most"]


def test_a_prompt_that_leaves_nothing_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to retrieve of 16 tokens"):
        list(shares(*loaded, ResultsFile(), lengths=[16], rows=[8], **HOW))
