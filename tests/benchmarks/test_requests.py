"""Random requests, cancelled, failing and short of memory, get the tokens that they get alone; the long form is a script."""

from __future__ import annotations

import pytest

from benchmarks import requests
from zoo import build_exact


@pytest.mark.parametrize("method", ["clusterkv", "icecache-digest"])
def test_disturbed_requests_get_their_own_tokens(method: str) -> None:
    found = requests.run(build_exact("llama", num_hidden_layers=2), method, 8, seed=1, kinds=4, rate=0.05)
    assert sum(found["ended"].values()) == 8
    assert found["failures"]
