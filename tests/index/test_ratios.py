"""How many keys collide and how many become candidates."""

from __future__ import annotations

from typing import Any

import pytest

from kvthaw.errors import ConfigError
from kvthaw.index.ratios import Ratios


def test_ratios_follow_the_region() -> None:
    ratios = Ratios()
    assert [ratios.wanted(n, 100) for n in (0, 40, 4999, 5000, 9999, 10000, 29999, 30000)] == [
        0, 40, 2500, 1250, 2500, 2000, 6000, 3000,
    ]  # fmt: skip
    assert ratios.most(131072, 100) == 13108
    assert ratios.most(32768, 100) == 6000
    assert ratios.limits(100_000) == [1000, 3000, 6000, 10000, 15000, 20000]
    assert Ratios(tiered=False).limits(100_000) == [0, 0, 0, 0, 0, 20000]
    assert all(ratios.wanted(n, 7) <= ratios.most(40000, 7) for n in range(0, 40001, 37))


def test_candidates_grow_more_slowly_in_long_regions() -> None:
    ratios = Ratios(least=8, growth=2 / 3)
    assert [ratios.wanted(n, 100) for n in (700, 4000, 100_000, 1 << 17, 1 << 20)] == [
        700,
        2000,
        10_000,
        13_108,
        4 * 13_107 + 1,
    ]
    assert ratios.wanted(100_000, 2000) == 16_000
    assert ratios.most(1 << 20, 100) == ratios.wanted(1 << 20, 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": 0.05, "beta": 0.1}, "rho is 0.05 and beta is 0.1"),
        ({"rho": 0.1}, "rho is 0.1 and beta is 0.5"),
        ({"rho": 1.5}, "rho is 1.5"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"candidates": 0}, "candidates is 0"),
        ({"beta": 0.1, "candidates": 7}, "give one of them"),
    ],
)
def test_bad_ratios_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Ratios(**options)
