"""Options from text."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvthaw.bench.asked import FIGURES, Decode, Figures, Indexing, Prefill, Serving
from kvthaw.bench.figures import PLANS
from kvthaw.bench.options import read, read_pairs, shown
from kvthaw.errors import ConfigError


def test_every_option_reads_its_text() -> None:
    pairs = "shape=qwen3-4b length=64,128,64 batch=2 method=full,quest budget=0.1 retrieved=7 dense_layers=1 steps=compiled"
    found = read_pairs(Decode, [*pairs.split(), "hits=0.5", "share_host=1", "out=a.jsonl", "host_bytes=9", "prompt=filled"])
    assert found == Decode(
        shape="qwen3-4b",
        length=(64, 128),
        batch=(2,),
        method=("full", "quest"),
        budget=0.1,
        retrieved=7,
        dense_layers=1,
        steps=("compiled",),
        hits=0.5,
        share_host=True,
        out=Path("a.jsonl"),
        host_bytes=9,
        prompt="filled",
    )


@pytest.mark.parametrize("kind", [Decode, Figures, Prefill, Indexing, Serving])
def test_a_default_reads_as_itself(kind: type) -> None:
    written = {one.name: text for one in fields(kind) if (text := shown(one)) is not None}
    assert written
    assert read(kind, written) == kind()


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("length=4k", "length is '4k'"),
        ("length=,", "length is ','"),
        ("profile=yes", "it must be 0 or 1"),
        ("lenght=4", "no option 'lenght'; there are: shape, length"),
        ("full", "arguments are name=value"),
    ],
)
def test_what_cannot_be_read_is_named(pair: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_pairs(Decode, [pair])


def test_a_number_that_is_too_small_is_refused() -> None:
    assert read_pairs(Serving, ["length=2"]).length == 2
    with pytest.raises(ConfigError, match="length is '1'; it must be a whole number of at least 2"):
        read_pairs(Serving, ["length=1"])


def test_every_figure_has_its_plan() -> None:
    assert list(FIGURES) == list(PLANS)
