"""How many samples share their steps."""

from __future__ import annotations

import pytest

from kvthaw.errors import ConfigError
from kvthaw.evaluate.rows import MOST_BYTES, MOST_ROWS, Rows
from zoo import build


def test_as_many_as_their_keys_and_values_leave_room_for() -> None:
    rows, token = Rows(build("llama"), None), 2 * 2 * 2 * 16 * 4  # layers, KV heads, head_dim, float32
    assert rows.at(100) == MOST_ROWS
    assert rows.at(MOST_BYTES // (token * 5)) == 5
    assert rows.at(MOST_BYTES) == 1
    assert Rows(build("llama"), 3).at(MOST_BYTES) == 3


def test_a_model_whose_layers_differ_takes_one() -> None:
    model = build("gemma4")
    assert Rows(model, None).at(100) == 1
    with pytest.raises(ConfigError, match=r"batch is 2; .*so only 1 works"):
        Rows(model, 2)
