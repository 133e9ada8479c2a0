"""Numbers as text for people, and what people write."""

from __future__ import annotations

import pytest

from kvthaw.errors import ConfigError
from kvthaw.formatting import counted, human, read_bytes


@pytest.mark.parametrize(
    "given", ["24GB", "24 GiB", "24gb", "24G", "24.0GB", "24576MB", 24 << 30, str(24 << 30), f"{24 << 30}B"], ids=str
)
def test_a_unit_is_a_power_of_1024(given: int | str) -> None:
    """As memory is sold: a card of 24GB has 24 GiB."""
    assert read_bytes(given, "memory") == 24 << 30
    assert human(read_bytes(given, "memory")) == "24.0 GiB"


@pytest.mark.parametrize("given", ["24XB", "24iGB", "GB", "", "-1GB", "1e9", "24ii", "24 i"], ids=str)
def test_what_is_no_number_of_bytes_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r"memory is .*such as"):
        read_bytes(given, "memory")


def test_one_thing_has_no_plural() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 4096)] == ["0 tokens", "1 token", "2 tokens", "4,096 tokens"]
