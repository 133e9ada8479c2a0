"""A step recorded in CUDA graphs, between which the host works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch


class SegmentedGraph:
    """What a step does on the device, in as many graphs as the host has something to do between.

    Work that the current stream is given within ``with SegmentedGraph() as recording:`` is captured, not done; replay() does it.
    All of its graphs share one pool of memory, so what one has left is there for the next. Other threads may go on meanwhile."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], None]] = []
        self._under_way = ExitStack()
        self._pool = torch.cuda.graph_pool_handle()
        self._reached = torch.cuda.Event()

    def __enter__(self) -> SegmentedGraph:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._under_way.__exit__(kind, error, trace)

    def host(self, call: Callable[[], None]) -> None:
        """Here, in every replay, the host waits until the device has done what came before, and call() precedes what follows."""
        self._under_way.close()
        self._calls.append(call)
        self._begin()

    def replay(self) -> None:
        """Do all of it. Returns when the last graph is launched; what a call raises comes up, and the rest is not done."""
        for graph, call in zip(self._graphs, self._calls, strict=False):
            graph.replay()
            self._reached.record()
            self._reached.synchronize()
            call()
        self._graphs[-1].replay()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        capture = torch.cuda.graph(self._graphs[-1], pool=self._pool, capture_error_mode="thread_local")
        self._under_way.enter_context(capture)
