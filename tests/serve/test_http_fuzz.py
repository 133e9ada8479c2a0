"""No request makes the server fail, whatever is in it, or keeps anything running."""

from __future__ import annotations

from itertools import islice

import pytest
from http_fuzz import Requests, answer
from servers import Served, until


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_are_answered_or_refused(served: Served, seed: int) -> None:
    statuses = set[int]()
    for asked in islice(Requests(seed), 60):
        status, problem = answer(served.http, asked)
        statuses.add(status)
        assert problem is None, str(asked)
    assert {200, 400} <= statuses
    until(lambda: not served.service.worker.open)
    assert served.http.get("/health").status_code == 200
    assert served.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200
