"""Captured steps on a machine without a GPU: what would be captured is done at once, and a replay does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvthaw.cache.streams import SegmentedGraph
from kvthaw.engine import graph_runner
from kvthaw.kernels.gpu import uncached_casts


class StandIn(SegmentedGraph):
    """In the place of a step's graphs. calls: how often the host had something to do between two."""

    def __init__(self) -> None:
        self.calls, self.state = 0, ExitStack()

    def __enter__(self) -> StandIn:
        self.state.enter_context(uncached_casts())
        return self

    def __exit__(self, *error: object) -> None:
        self.state.close()

    def host(self, call: Callable[[], None]) -> None:
        self.calls += 1
        call()

    def replay(self) -> None:
        """Nothing is left to do."""


def captured_by(monkeypatch: pytest.MonkeyPatch, graph: Callable[[], StandIn]) -> None:
    """Steps are captured by such graphs."""
    monkeypatch.setattr(graph_runner, "SegmentedGraph", graph)
