"""Random requests, cancelled, failing and short of memory, get the tokens that they get alone; the long form is a script."""

from __future__ import annotations

import pytest

from lab import requests
from zoo import build_exact


@pytest.mark.parametrize("method", ["clusterkv", "icecache-digest"])
def test_disturbed_requests_get_their_own_tokens(method: str) -> None:
    found = requests.run(build_exact("llama", num_hidden_layers=2), method, 8, seed=3, kinds=4, rate=0.05)
    assert sum(found["ended"].values()) == 8
    assert found["failures"]


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "seed"), [("auto", 5), ("auto", 12), ("pariskv-plus", 11), ("clusterkv-plus", 6)])
def test_replayed_steps_follow_blocks_that_move(method: str, seed: int) -> None:
    """Blocks of a few sequences lie on the device, and go to the host and come back while others join and leave."""
    found = requests.run(requests.tiny("llama", "cuda"), method, 40, seed)
    assert sum(found["ended"].values()) == 40
