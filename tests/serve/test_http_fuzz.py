"""No request makes the server fail, whatever is in it, or keeps anything running."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from http_fuzz import TEMPLATE, Requests, answer
from servers import Served, serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def tooled(loaded: tuple[PreTrainedModel, Any]) -> Iterator[Served]:
    with serving(*loaded, chat_template=TEMPLATE) as one:
        yield one


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_are_answered_or_refused(tooled: Served, seed: int) -> None:
    statuses = set[int]()
    for asked in islice(Requests(seed), 60):
        status, problem = answer(tooled.http, asked)
        statuses.add(status)
        assert problem is None, str(asked)
    assert {200, 400} <= statuses
    until(lambda: not tooled.service.worker.open)
    assert tooled.http.get("/health").status_code == 200
    assert tooled.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200
