"""A step captured as several CUDA graphs, with host work between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch


class SegmentedGraph:
    """CUDA graphs of one step, split wherever the host has work to do.

    Work enqueued on the current stream inside ``with SegmentedGraph() as recording:`` is captured, not run; replay() runs
    it. The graphs share one memory pool, so later graphs can read the results of earlier ones. Other threads may continue
    meanwhile.
    """

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
        """Split the graph here: every replay waits for the device and runs call() before the rest."""
        self._under_way.close()
        self._calls.append(call)
        self._begin()

    def replay(self) -> None:
        """Run all graphs and calls. Returns when the last graph is launched. If a call raises, the rest does not run."""
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
