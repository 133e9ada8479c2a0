"""Random requests that begin alike get the tokens that they get alone; the long form is a script."""

from __future__ import annotations

import pytest

from kvthaw.engine.request import Request
from lab.requests import tiny
from lab.shared_prefixes import run


def test_requests_that_begin_alike_have_their_own_tokens() -> None:
    found = run(tiny("llama", num_hidden_layers=3), ["quest", "pariskv"], 40, seed=0)
    assert sum(found["ended"].values()) == 40
    assert found["ended"]["length"] > 20
    assert found["cached_tokens"] > 2000


def test_another_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [0], Request.take

    def other(self: Request, token: int, *more: object) -> bool:
        taken[0] += 1
        return take(self, 1 + token % 7 if taken[0] == 60 else token, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Request, "take", other)
    with pytest.raises(AssertionError, match=r"tokens kept: .* alone"):
        run(tiny("llama", num_hidden_layers=3), ["quest"], 24, seed=0)
