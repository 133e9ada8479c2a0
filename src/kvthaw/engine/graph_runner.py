"""Captured decode steps: a whole forward of one token, captured once in CUDA graphs and replayed.

If the index is on the device, a step is one graph, with selection, fetch from the host, attention and residency inside, and nothing
waits for the host. If it is on the host, a step has one graph more than searches, with a round trip for each search. Other work
of the host (a full ring, tables that grow) happens between replays. If a tensor that the graphs read has moved, the step runs
eagerly, and the next one is captured again.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from kvthaw.cache.index_api import Method
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.segmented_graph import SegmentedGraph
from kvthaw.cache.streams import Observer
from kvthaw.engine.ops import serving

_log = logging.getLogger(__name__)
_Captured = tuple[Tensor, Tensor, Tensor, SegmentedGraph | None, int]
_CLEARS = 8  # layers that drop a cleared sequence behind one step, .6 ms of the host beside what index updates take
_WARM = 2  # eager steps before a capture, in which kernels are compiled and tuned


class ModelCache(Protocol):
    """A past_key_values of transformers with a KVCache behind it."""

    kv: KVCache
    turns_by_length: str | None
    """The kind of rotary positions that depend on the longest row of a forward, None for others."""

    @property
    def layers(self) -> Sequence[object]:
        """All layers of the model, kvthaw's and others."""


def compilable(cache: ModelCache) -> str | None:
    """Return why steps of a cache cannot be compiled with kvthaw's attention as one operator, None if they can."""
    if len(cache.kv.layers) != len(cache.layers):
        return "the model has layers that transformers serves itself"
    if cache.turns_by_length:
        return f"the model's {cache.turns_by_length} positions need the host in every step"
    if cache.kv.settings.method.prefetches:
        return f"{cache.kv.settings.method.name} looks into the model between its layers"
    return None


def capturable(cache: ModelCache) -> str | None:
    """Return why steps of a cache cannot be captured, None if they can."""
    return compilable(cache) or search_needs_host(cache.kv)


def search_needs_host(kv: KVCache) -> str | None:
    """Return why steps of the method in force cannot be captured, None if they can."""
    method, layers = kv.settings.method, kv.offloaded
    if method.index is not None and layers and not layers[0].everything:
        index = None if layers[0].retriever is None else layers[0].retriever.index
        return needs_host(method, safe=index is not None and (index.traits.graph_safe or index.traits.on_host))
    return None


def needs_host(method: Method, *, safe: bool) -> str | None:
    """Return what a step of a method needs the host for within its graphs, None for nothing. safe: the index selects on the device
    without a sync, or on the host between graphs."""
    if not safe:
        return f"{method.name} needs the host in every step"
    if method.transfer is not None and not method.transfer().graph_safe:
        return f"{method.name} has its rows gathered by the host"
    return None


def bucket(kv: KVCache, rows: int) -> int:
    """Return the bucket (Sequences.bucket) of the next step of the first sequences; 0 where nothing is selected on the device, so
    that a capture serves all lengths."""
    first = next(iter(kv.offloaded), None)
    on_device = first is not None and (first.everything or (first.retriever is not None and not first.on_host))
    return kv.sequences.bucket(rows) if on_device else 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: a capture fails if an earlier graph is destroyed meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compiled_step(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a model's forward for single tokens, with kvthaw's attention as one operator of its graph."""
    return torch.compile(forward, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


class GraphRunner:
    """Runs decode steps of one token of a cache by replaying a captured forward.

    forward(input_ids=, position_ids=, past_key_values=, use_cache=, attention_mask=) is the model's own, or that compiled.
    capture: False runs it eagerly at every step. captures, capture_seconds: how often a graph was captured and how long that took
    in all; capture_bytes: device memory that the latest one took. Steps of other numbers of rows, and of sequences in another
    bucket, have graphs of their own.
    """

    def __init__(self, forward: Callable[..., Any], cache: ModelCache, *, compiled: bool = False, capture: bool = True) -> None:
        self._cache, self.compiled, self.capture = weakref.ref(cache), compiled, capture
        self.captures, self.capture_seconds, self.capture_bytes = 0, 0.0, 0
        self._forward, self._kv, self._captures = forward, cache.kv, capture
        self._graph: SegmentedGraph | None = None
        self._addresses: tuple[int, ...] = ()
        self._steady = 0
        self._observers: list[Observer] = []  # those that the graph has captured
        self._ids = self._positions = self._logits = torch.empty(0)
        self._kind = 0, 0  # of a step: its rows and their bucket
        self._others: dict[tuple[int, int], _Captured] = {}

    def __call__(self, ids: Tensor, positions: Tensor, *, ahead: bool = True) -> Tensor:
        """Logits [B, 1, V] of one token a row, ids and positions [B, 1]; valid until the next step.

        ahead: what the next step needs the host for is enqueued behind this one where it can be taken back, since something else
        may come; False where run_ahead() follows. A step that raises was not counted; take it again, or go on with something
        else."""
        kv = self._kv
        kv.finite.check()
        with torch.inference_mode(False), torch.no_grad():  # what is kept from step to step are plain tensors
            logits = self._take(ids, positions)
            if ahead:
                kv.run_ahead()
            if self._graph is not None:
                kv.sequences.place_before_step(ids.device)  # while the device is at work
            kv.finite.ask(kv.layers)
            return logits

    def run_ahead(self) -> None:
        """Do all that the next step needs the host for, behind what the device was given of this one. Call it only where another
        step or a clear is certain."""
        with torch.inference_mode(False), torch.no_grad():
            self._kv.finish_clear(_CLEARS)
            self._kv.run_ahead(certain=True)

    def prepare(self) -> None:
        """Do now what a captured step that is certain to come needs the host for first. What fails is left to the step."""
        sequences = self._kv.sequences
        if self._captures and sequences.step is None:
            with suppress(Exception), torch.inference_mode(False), torch.no_grad():
                self._prepare()
                sequences.known[id(self)] = sequences.padded_length

    def _take(self, ids: Tensor, positions: Tensor) -> Tensor:
        kind = len(ids), bucket(self._kv, len(ids))
        if self._kind != kind or self._ids.shape != ids.shape or self._ids.device != ids.device:
            self._switch(kind, ids, positions)
        self._ids.copy_(ids)  # every step reads the same two tensors, so that a compiled forward meets no other strides
        self._positions.copy_(positions)
        kv, sequences = self._kv, self._kv.sequences
        observers = kv.streams.observers
        eager = not all(getattr(observer, "graph_safe", False) for observer in observers)  # Python, which a replay leaves out
        if not self._captures or eager or sequences.step is not None:  # a step failed: layers take it again, or go back
            return self._run()
        if self._observers != observers:
            self._graph, self._steady, self._observers = None, 0, list(observers)
            self._others.clear()
        if self._graph is None or sequences.known.get(id(self)) != sequences.padded_length or kv.needs_host():
            self._prepare()
        if self._graph is None:
            kv.finish_clear()  # of which a capture must know nothing
            if bucket(kv, len(ids)) != kind[1]:  # nor be kept for the bucket that it took until then
                return self._take(ids, positions)
            self._steady += 1
            if self._steady <= _WARM:
                return self._run()
        sequences.place_before_step(self._ids.device)
        try:
            with kv.counted_forward():
                if self._graph is None:
                    self._capture().replay()  # the capture runs the step's Python once, which counts it
                else:
                    sequences.begin(1, dense=False)
                    self._graph.replay()  # until its last graph is launched; the rest is done while the device is at work
                    sequences.commit()
                    sequences.count_replay()
        except BaseException:
            sequences.forget_device()  # the device may have gone on, or not have done what was captured
            raise
        kv.after_step()
        sequences.known[id(self)] = sequences.padded_length  # at which no tensor has moved
        return self._logits

    def _switch(self, kind: tuple[int, int], ids: Tensor, positions: Tensor) -> None:
        """Use the inputs, the graph and its output of steps of a kind."""
        self._others[self._kind] = self._ids, self._positions, self._logits, self._graph, self._steady
        captured = self._others.pop(kind, None)
        if captured is None or captured[0].shape != ids.shape or captured[0].device != ids.device:
            own = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (ids, positions)]
            captured = own[0], own[1], torch.empty(0), None, 0
        self._kind, (self._ids, self._positions, self._logits, self._graph, self._steady) = kind, captured

    def _prepare(self) -> None:
        self._kv.before_step()
        addresses = tuple(tensor.data_ptr() for tensor in self._kv.tensors())
        if addresses != self._addresses:
            if self._graph is not None:
                _log.info("what the captured step reads has moved; decoding eagerly until it is steady")
            self._graph, self._addresses, self._steady = None, addresses, 0
            self._others.clear()
            self._captures = self.capture and search_needs_host(self._kv) is None

    def _run(self) -> Tensor:
        cache = self._cache()
        assert cache is not None
        # A mask of four dimensions is taken as it is, so that a compiled forward asks for no length; the layers know their padding.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._ids.device) if self.compiled else None
        with serving(cache.kv), self._kv.counted_forward():
            out = self._forward(
                input_ids=self._ids,
                position_ids=self._positions,
                past_key_values=cache,
                use_cache=True,
                attention_mask=mask,
            )
        logits: Tensor = out.logits
        return logits

    def _capture(self) -> SegmentedGraph:
        begin, device = time.perf_counter(), self._ids.device
        with _uncollected(), SegmentedGraph() as graph:
            before = torch.cuda.memory_reserved(device)
            with self._kv.streams.records(graph):
                self._logits = self._run()
        self._graph = graph
        self.captures += 1
        self.capture_bytes = torch.cuda.memory_reserved(device) - before
        self.capture_seconds += time.perf_counter() - begin
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied cache captures again."""
