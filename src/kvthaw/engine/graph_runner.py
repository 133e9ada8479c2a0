"""Captured decode steps: a whole forward of one token, captured once in CUDA graphs and replayed.

If the index is on the device, a step is one graph, with selection, fetch, attention and residency inside, and nothing waits
for the host. If the index is on the host, a step has one more graph than searches, with a round trip to the host for each
search. Other host work (a full ring, tables that grow) runs between replays. If a tensor that the graphs read has moved, or
other adapters are active, the step runs eagerly and a later one is captured again. Adapters are compared when a prompt has come,
and every 64 tokens. If the model needs the host, a capture fails, and all steps from
that one on run eagerly.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvthaw.cache.device_memory import uncollected
from kvthaw.cache.index_api import Method
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.streams import Observer, SegmentedGraph
from kvthaw.errors import CacheError, KvthawError, first_line
from kvthaw.kernels.gpu import autocast_dtype

_log = logging.getLogger(__name__)
_Kind = tuple[int, int, torch.dtype | None]
"""Rows and bucket of a step, and the dtype to which autocast casts."""
_COMPARED = 64  # tokens after which adapters are compared, if no prompt comes
_WARM = 2  # eager steps before a capture; they compile and tune kernels


class ModelCache(Protocol):
    """A past_key_values of transformers that holds a KVCache."""

    kv: KVCache
    argument: str
    """The name of the cache among the arguments of the model's forward."""
    turns_by_length: str | None
    """The kind of rotary positions that depend on the longest row of a forward; None for others."""

    @property
    def layers(self) -> Sequence[object]:
        """All layers of the model, including layers that kvthaw does not serve."""

    def adapters(self) -> object:
        """Return the adapters that the model computes with now."""


def forward_needs_host(cache: ModelCache) -> str | None:
    """Return why a forward of the model itself cannot be captured, whatever its index does; None if it can."""
    if len(cache.kv.layers) != len(cache.layers):
        return "the model has layers that transformers serves itself"
    if cache.turns_by_length:
        return f"the model's {cache.turns_by_length} positions need the host in every step"
    if cache.kv.settings.method.prefetches:
        return f"{cache.kv.settings.method.name} looks into the model between its layers"
    return None


def capturable(cache: ModelCache) -> str | None:
    """Return why steps of a cache cannot be captured; None if they can."""
    return forward_needs_host(cache) or search_needs_host(cache.kv)


def search_needs_host(kv: KVCache) -> str | None:
    """Return why steps of the method in force cannot be captured; None if they can."""
    method, layers = kv.settings.method, kv.offloaded
    if method.index is not None and layers and not layers[0].attends_to_all:
        index = None if layers[0].retriever is None else layers[0].retriever.index
        return needs_host(method, safe=index is not None and (index.traits.graph_safe or index.traits.on_host))
    return None


def needs_host(method: Method, *, safe: bool) -> str | None:
    """Return what a method needs the host for within a step's graphs; None if nothing.

    safe: the index selects on the device without a sync, or on the host between graphs.
    """
    if not safe:
        return f"{method.name} needs the host in every step"
    if method.transfer is not None and not method.transfer().graph_safe:
        return f"{method.name} has its rows gathered by the host"
    return None


def bucket(kv: KVCache, rows: int) -> int:
    """Return the bucket (Sequences.bucket) of the next step of the first `rows` sequences.

    Returns 0 if nothing is selected on the device, so that one capture serves all lengths.
    """
    first = next(iter(kv.offloaded), None)
    on_device = first is not None and (first.attends_to_all or (first.retriever is not None and not first.on_host))
    return kv.sequences.bucket(rows) if on_device else 0


@dataclass(eq=False, slots=True)
class _Step:
    """A kind of step.

    ids, positions: [B, 1], the inputs of every such step.
    logits: [B, 1, V], of the graph.
    steady: number of eager steps since what they read last moved.
    """

    ids: Tensor
    positions: Tensor
    logits: Tensor
    graph: SegmentedGraph | None = None
    steady: int = 0


class CapturedSteps:
    """Run one-token decode steps of a cache by replaying a captured forward.

    Steps with other numbers of rows, with sequences in another bucket, or under another autocast have graphs of their own.

    forward: forward(input_ids=, position_ids=, use_cache=, and the cache).
    capture: False: run every step eagerly.
    captures, capture_seconds: number of captures, and their total time.
    capture_bytes: device memory of the latest capture.
    """

    def __init__(self, forward: Callable[..., Any], cache: ModelCache, *, capture: bool = True) -> None:
        self._owner, self.capture = weakref.ref(cache), capture
        self.captures, self.capture_seconds, self.capture_bytes = 0, 0.0, 0
        self._forward, self._kv, self._captures = forward, cache.kv, capture
        self._read: tuple[object, ...] = ()  # what the graphs read: adapters, and addresses of tensors
        self._adapters: tuple[object, object] = None, None  # when they were compared, and which there were
        self._unmoved = -1, -1  # the version and length of the sequences for which _read was compared
        self._observers: list[Observer] = []  # observers that the graphs include
        self._kind: _Kind = 0, 0, None
        self._steps: dict[_Kind, _Step] = {}

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits [B, 1, V] for one token per row, valid until the next step.

        If this raises, the step was not counted: repeat it, or continue with something else.

        ids, positions: [B, 1].
        """
        kv = self._kv
        with torch.inference_mode(False), torch.no_grad():  # tensors kept between steps must be plain tensors
            logits = self._take(ids, positions)
            self._work_ahead()
            if self._steps[self._kind].graph is not None:
                kv.sequences.place_before_step(ids.device)  # while the device is at work
            kv.finite.ask(kv.layers)
            return logits

    @property
    def _cache(self) -> ModelCache:
        """The cache, which may own this object. Raises CacheError if it is gone."""
        if (cache := self._owner()) is None:
            raise CacheError("the cache that these steps were made for is gone")
        return cache

    def _work_ahead(self) -> None:
        """Enqueue host work of the next step behind this one."""

    def _take(self, ids: Tensor, positions: Tensor) -> Tensor:
        kind = len(ids), bucket(self._kv, len(ids)), autocast_dtype(ids.device)
        switches, self._kind = kind != self._kind, kind
        if kind not in self._steps:
            own = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (ids, positions))
            self._steps[kind] = _Step(next(own), next(own), torch.empty(0))
        step = self._steps[kind]
        step.ids.copy_(ids)  # every step of a kind reads the same two tensors
        step.positions.copy_(positions)
        kv, sequences = self._kv, self._kv.sequences
        observers = kv.streams.observers  # a replay would skip the Python code of others than graph_safe ones
        safe = all(getattr(observer, "graph_safe", False) for observer in observers)
        if not (self._captures and safe) or sequences.step is not None:  # after a failed step, layers repeat it or roll back
            return self._run(step)
        if self._observers != observers:
            self._drop_graphs()
            self._observers = list(observers)
        if switches or step.graph is None or self._unmoved != self._place() or kv.needs_host():
            self._prepare()
        if step.graph is None:
            kv.finish_clear()  # a capture must not contain this
            if bucket(self._kv, len(ids)) != kind[1]:  # nor be kept for the bucket before it
                return self._take(ids, positions)
            step.steady += 1
            if step.steady <= _WARM:
                return self._run(step)
        sequences.place_before_step(ids.device)
        try:
            with kv.counted_forward():
                if step.graph is None:
                    self._capture(step).replay()  # the capture runs the step's Python once, which counts it
                else:
                    begun = sequences.begin(1, dense=False)
                    step.graph.replay()  # returns when the last graph is launched; the rest overlaps the device
                    sequences.commit(begun)
                    sequences.count_replay()
        except BaseException as error:
            sequences.forget_device()  # the device may have advanced, or may not have run the capture
            ours = isinstance(error, (KvthawError, torch.OutOfMemoryError))
            if step.graph is not None or ours or not isinstance(error, RuntimeError):
                raise
            logits = self._run(step)  # raises if the capture was not the cause
            _log.warning("steps are not captured, since the model needs the host: %s", first_line(error))
            self.capture = self._captures = False
            return logits
        kv.after_step()
        self._unmoved = self._place()  # no tensor has moved at this length
        return step.logits

    def _place(self) -> tuple[int, int]:
        return self._kv.sequences.version, self._kv.sequences.padded_length

    def _prepare(self) -> None:
        self._kv.before_step()
        sequences = self._kv.sequences
        if self._adapters[0] != (at := (sequences.prefills, sequences.padded_length // _COMPARED)):
            self._adapters = at, self._cache.adapters()
        read = self._adapters[1], *(tensor.data_ptr() for tensor in self._kv.tensors())
        if read != self._read:
            if any(step.graph is not None for step in self._steps.values()):
                _log.info("what the captured step reads has changed; decoding eagerly until it is steady")
            self._drop_graphs()
            self._read = read
            self._captures = self.capture and search_needs_host(self._kv) is None

    def _drop_graphs(self) -> None:
        """Drop the graphs of all kinds, and the inputs of all but the latest."""
        self._steps = {kind: step for kind, step in self._steps.items() if kind == self._kind}
        for step in self._steps.values():
            step.graph, step.steady = None, 0

    def _run(self, step: _Step) -> Tensor:
        cache = self._cache
        given = {"input_ids": step.ids, "position_ids": step.positions, cache.argument: cache}
        with cache.kv.unmasked(), self._kv.counted_forward():
            out = self._forward(**given, use_cache=True)
        logits: Tensor = out.logits
        return logits

    def _capture(self, step: _Step) -> SegmentedGraph:
        begin, device = time.perf_counter(), step.ids.device
        with uncollected(), SegmentedGraph() as graph:
            before = torch.cuda.memory_reserved(device)
            with self._kv.streams.records(graph):
                step.logits = self._run(step)
        step.graph = graph
        self.captures += 1
        self.capture_bytes = torch.cuda.memory_reserved(device) - before
        self.capture_seconds += time.perf_counter() - begin
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied cache captures again."""


class ElasticGraph(CapturedSteps):
    """Captured steps of a cache whose capacity grows. There is one bucket: a graph serves all lengths until what it reads moves."""

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Raise CacheError if keys or values of an earlier step were not finite; else as CapturedSteps."""
        self._kv.finite.check()
        return super().__call__(ids, positions)

    def _work_ahead(self) -> None:
        self._kv.run_ahead()  # a step need not follow: only what can be undone


class StaticGraphs(CapturedSteps):
    """Captured steps of a running batch, whose tensors have a fixed capacity. Each bucket of lengths has a graph.

    The batch calls run_ahead() after a step, and prepare() before one, while the device is at work. It looks for keys and values
    that are not finite.
    """

    def run_ahead(self) -> None:
        """Run all host work of the next step while the device runs this one. Requires that another step or a clear follows."""
        with torch.inference_mode(False), torch.no_grad():
            self._kv.finish_clear(all=False)
            self._kv.run_ahead(certain=True)

    def prepare(self) -> None:
        """Run host work of a captured step that is certain to follow. Work that fails is left to the step."""
        if self._captures and self._kv.sequences.step is None:
            with suppress(Exception), torch.inference_mode(False), torch.no_grad():
                self._prepare()
                self._unmoved = self._place()
