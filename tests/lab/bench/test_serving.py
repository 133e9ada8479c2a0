"""A benchmark of serving counts the steps of a full batch, and refuses a method whose requests disturb each other."""

from __future__ import annotations

import pytest
import torch

from kvthaw.engine.batch import Batch
from kvthaw.engine.request import Request
from kvthaw.errors import CacheError
from kvthaw.evaluate.results import ResultsFile
from lab.bench import serving
from lab.bench.serving import Serving

pytestmark = pytest.mark.usefixtures("small")


def test_serving_is_measured() -> None:
    (line,) = serving.run(Serving(length=64, max_seqs=2, requests=3, new_tokens=12, budget=32), ("quest",), ResultsFile())
    assert line["steps"] > 0
    assert 0 < line["step_ms_p50"] <= line["step_ms_p95"] <= line["step_ms_max"]
    assert line["join_s_p50"] > 0
    assert (line["captures"], line["capture_bytes"]) == (0, 0)


def test_a_request_that_is_disturbed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Batch.step

    def wrong(self: Batch) -> list[Request]:
        found = honest(self)
        if self.max_seqs > 1:
            found[0].tokens[-1] ^= 1
        return found

    monkeypatch.setattr(Batch, "step", wrong)
    with pytest.raises(CacheError, match="oracle: a request in company gets other tokens"):
        serving.check("oracle", torch.device("cpu"))
