"""twilight as a method, around others."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from unit_methods import generate

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from zoo import prompt

BASES = ["quest", "oracle", "clusterkv", "icecache-digest", "pariskv"]


def test_it_is_its_base_with_another_index() -> None:
    method, base = resolve("twilight:base=arkvale"), resolve("arkvale")
    assert (method.name, method.paper, method.unit, method.regions) == ("twilight", "Twilight", "page", base.regions)


def test_it_reads_less_than_its_base(llama: PreTrainedModel) -> None:
    read = []
    for method in ("twilight:p=0.5", "quest"):
        with kvthaw.attach(llama, method, budget=96) as handle:
            generate(llama, {"input_ids": prompt(1, 260)})
            read.append(handle.stats().retrieved)
    assert read[0] < 0.8 * read[1]


def test_bases_that_cannot_be_pruned_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="base is streaming"):
        resolve("twilight", base="streaming")
    for base, words in (
        ("retroinfer", "weighs or estimates"),
        ("magicpig", "weighs or estimates"),
        ("shadowkv", "keys of its own"),
    ):
        with pytest.raises(ConfigError, match=words), kvthaw.attach(llama, "twilight", base=base, budget=64):
            generate(llama, {"input_ids": prompt(1, 150)}, 3)
