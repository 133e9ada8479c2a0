"""What is said of a method is so."""

from __future__ import annotations

import pytest

from kvthaw.evaluate.describe import describe, word
from kvthaw.methods import resolve


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ("oracle", 2 * 128),  # the keys, in bf16
        ("pariskv", 112),
        ("pqcache", 2),
        ("pqcache:parts=4", 4),
        ("magicpig", 2 * 150 + 2 * 128),
        ("omnikv", 2 * 2 * 128),
        ("omnikv:dense=False", 2 * 128),
        ("snapkv", 0),
        ("h2o", 0),
        ("icecache-digest", 0),
        ("full", None),
    ],
)
def test_bytes_a_key_are_those_of_the_formats(method: str, held: int | None) -> None:
    assert describe(resolve(method))["bytes_a_key"] == held


def test_options_that_suit_few_rows_are_no_error() -> None:
    """How many rows there will be is the caller's to say: 100 candidates serve retrieved=100."""
    assert describe(resolve("pariskv:candidates=100"))["bytes_a_key"] == 112


@pytest.mark.parametrize("page", [16, 64])
def test_a_page_costs_its_digest_and_room_to_grow(page: int) -> None:
    held = describe(resolve("quest", page=page))["bytes_a_key"]
    assert 516 / page <= held <= 1.3 * 516 / page


def test_less_than_a_byte_a_key_is_not_0() -> None:
    assert word(describe(resolve("quest", page=1024))["bytes_a_key"]) == "0.8"


def test_a_node_costs_its_mean_its_outliers_and_room_to_grow() -> None:
    for outliers, promote in ((2, 0.05), (0, 0.02)):
        held = describe(resolve("icecache-digest-device", outliers=outliers, promote=promote))["bytes_a_key"]
        own = promote * (2 * (128 * (1 + outliers) + 8) + 4) + 4
        assert own <= held <= 1.3 * own


@pytest.mark.parametrize(
    ("method", "kv"),
    [("full", "dense"), ("streaming", "evicts"), ("snapkv", "evicts"), ("snapkv-refreshed", "offloads"), ("h2o", "evicts")],
)
def test_evicted_or_offloaded(method: str, kv: str) -> None:
    assert describe(resolve(method))["kv"] == kv


def test_words_of_the_tables() -> None:
    assert [word(value) for value in (None, True, False, 0, 1, "page")] == ["-", "yes", "no", "0", "1", "page"]
