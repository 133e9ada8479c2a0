"""Decoding by replay: a whole forward of one token, captured once in CUDA graphs.

Of a method that decides on the device it is one, with selection, fetch from the host, attention and residency inside, and nothing
waits for the host. Where an index on the host selects, they are as many as there are searches and one more: a round trip for each.
What else needs the host (a full ring, tables that grow) happens between replays. Where a tensor that they read has moved since,
the step runs eagerly and the next one captures anew.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.layer import FrozenLayer
from kvthaw.cache.recording import Recording
from kvthaw.engine.ops import serving
from kvthaw.errors import CacheError
from kvthaw.types import Method

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache

_log = logging.getLogger(__name__)
_PLAIN = {"input_ids", "position_ids", "past_key_values", "attention_mask", "use_cache", "logits_to_keep", "return_dict"}
_WARM = 2  # eager steps before a capture, in which kernels are compiled and tuned


def compilable(cache: Cache) -> str | None:
    """None if every step of a cache can be compiled, kvthaw's attention being one operator in it, else the reason why not."""
    if len(cache.kv_layers) != len(cache.layers):
        return "the model has layers that transformers serves itself"
    if cache.turns_by_length:
        return f"the model's {cache.turns_by_length} positions need the host in every step"
    if cache.settings.method.foresees:
        return f"{cache.settings.method.name} looks into the model between its layers"
    return None


def capturable(cache: Cache) -> str | None:
    """None if every step of a cache can be captured, compiled or not, else the reason why not."""
    reason = compilable(cache)
    if reason is not None:
        return reason
    method, layers = cache.settings.method, cache.frozen_layers
    if method.index is not None and layers:
        index = None if layers[0].group is None else layers[0].group.index
        return asks_host(method, safe=index is not None and (index.graph_safe or index.on_host))
    return None


def asks_host(method: Method, *, safe: bool) -> str | None:
    """What a step of a method that selects has the host do within its graphs; None: nothing. safe: of its index, it selects on the
    device without asking, or on the host, between graphs."""
    if not safe:
        return f"{method.name} needs the host in every step"
    if method.transfer is not None and not method.transfer().graph_safe:
        return f"{method.name} has its rows gathered by the host"
    return None


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected: an earlier graph among it would be destroyed, and a capture fails where one is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compiled_step(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward compiled for single tokens, kvthaw's attention being one operator of its one graph."""
    return torch.compile(forward, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def replaying(
    forward: Callable[..., Any], cache_of: Callable[[Any], Cache | None], *, compiled: bool = False
) -> Callable[..., Any]:
    """A model's forward that replays single tokens where it can and calls the model where it cannot.

    cache_of: the kvthaw cache behind a past_key_values, or None. What is not a plain step of one token (prompts, several tokens at
    once, hidden states or attentions asked for, embeddings given) goes to the model as before. compiled: see compiled_step; what
    cannot be captured is compiled all the same where that can be. Why steps of one token are not replayed is logged, each reason
    once; as a warning where compiled ones were asked for and they are eager.
    """
    single = compiled_step(forward) if compiled else forward
    told: set[str] = set()

    def tell(how: str, reason: str, level: int) -> None:
        if reason not in told:
            told.add(reason)
            _log.log(level, "steps are %s: %s", how, reason)

    @functools.wraps(forward)
    def step(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = cache_of(kwargs.get("past_key_values"))
        extra = set(kwargs) - _PLAIN
        if (
            cache is None
            or ids is None
            or ids.shape[1] != 1
            or cache.kv_layers[0].seen == 0
            or any(kwargs[name] is not None for name in extra)
        ):
            return forward(*args, **kwargs)
        if cache.replay is None or cache.reordered:
            reason = "beams change places between steps" if cache.reordered else capturable(cache)
            if not ids.is_cuda:
                reason = "the model is on a CPU"
            if reason is not None:
                if not (compiled and ids.is_cuda and not cache.reordered and compilable(cache) is None):
                    tell("taken eagerly", reason, logging.WARNING if compiled else logging.INFO)
                    return forward(*args, **kwargs)
                tell("compiled, not captured", reason, logging.INFO)
            cache.replay = Replay(single, cache, compiled=compiled, capture=reason is None)
        if kwargs.get("attention_mask") is not None:
            cache.check_mask(kwargs["attention_mask"])  # the captured step takes none
        positions = kwargs.get("position_ids")
        if positions is None:
            layer = cache.kv_layers[0]
            positions = torch.tensor([[layer.length(lane)] for lane in range(layer.lanes)], device=ids.device)
        return CausalLMOutputWithPast(logits=cache.replay(ids, positions), past_key_values=kwargs["past_key_values"])

    return step


class Replay:
    """Takes single tokens of one cache by replaying a captured forward.

    forward(input_ids=, position_ids=, past_key_values=, use_cache=, attention_mask=) is the model's own, or that compiled.
    capture: False runs it eagerly at every step. captures, capture_seconds: how often a graph was captured and how long that took
    in all; capture_bytes: device memory that the latest one took.
    """

    def __init__(self, forward: Callable[..., Any], cache: Cache, *, compiled: bool = False, capture: bool = True) -> None:
        self._cache, self.compiled, self.capture = weakref.ref(cache), compiled, capture
        self.captures, self.capture_seconds, self.capture_bytes = 0, 0.0, 0
        self._forward = forward
        self._layers: list[FrozenLayer | DenseLayer] = cache.kv_layers
        self._frozen: list[FrozenLayer] = cache.frozen_layers
        kinds = {type(layer): layer for layer in reversed(self._layers)}
        self._watch = list(kinds.values())  # the first of each kind: all layers of a kind are due at once and share a clock
        self._known: tuple[object, int] = (None, -1)  # era and tokens up to which no layer has moved anything
        self._interrupted: object | None = None  # the era in which layers counted a token that not all of them took
        self._owing = False  # a layer is due that is not watched
        self._graph: Recording | None = None
        self._addresses: tuple[int, ...] = ()
        self._steady = 0
        self._ids = self._positions = self._logits = torch.empty(0)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, 1, V] of one token a row, ids and positions [B, 1]; valid until the next step.

        What the next step needs the host for is enqueued behind this one where it can be taken back: something else may come."""
        self.cache.check_finite()
        with torch.inference_mode(False), torch.no_grad():  # what is kept from step to step are plain tensors
            logits = self._whole(ids, positions)
            if self.due():
                self._ahead([layer for layer in self._layers if layer.goes_ahead])
            return logits

    @property
    def cache(self) -> Cache:
        """The cache, which holds this."""
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def interrupted(self) -> bool:
        """Whether the last step failed after layers had counted a token that not all of them took."""
        return self._interrupted is not None

    def go_ahead(self) -> None:
        """Have all of it done. Only for who knows that the next step comes, or that its lanes are cleared."""
        with torch.inference_mode(False), torch.no_grad():
            self._ahead(self._layers)

    def due(self) -> bool:
        """Whether a layer needs the host before the next step."""
        return self._owing or any(layer.due() for layer in self._watch)

    def _ahead(self, layers: list[FrozenLayer | DenseLayer]) -> None:
        for layer in layers:
            layer.go_ahead()
        for layer in layers:
            layer.catch_up()
        self._owing = any(layer.due() for layer in self._layers)  # those of a kind are due at once, and then some went ahead

    def _whole(self, ids: Tensor, positions: Tensor) -> Tensor:
        """_take(), or nothing: a captured step that fails can be taken again. Where it failed when it had been counted, as the one
        that is captured is and all eager ones are, the cache is refused until it changes."""
        first = self._layers[0]
        if self._interrupted is not None:
            if self._interrupted is first.era or any(layer.seen != first.seen for layer in self._layers):
                raise CacheError("a step was interrupted after layers had counted its token; reset() the cache")
            self._interrupted = None
        before = first.seen
        try:
            return self._take(ids, positions)
        except BaseException:
            for layer in self._watch:
                layer.clock.forget()  # the device may have gone on
            self._known = None, -1
            if any(layer.seen != before for layer in self._layers):
                self._interrupted = first.era
            raise

    def _take(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._ids.shape != ids.shape or self._ids.device != ids.device:
            self._ids, self._positions = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (ids, positions))
            self._graph = None
        self._ids.copy_(ids)  # every step reads the same two tensors, so that a compiled forward meets no other strides
        self._positions.copy_(positions)
        if not self.capture:
            return self._run()
        era, seen = self._known
        moved = era is not self._layers[0].era or seen != self._layers[0].seen
        if self._graph is None or moved or self.due():
            self._prepare()
        if self._graph is None:
            self._steady += 1
            if self._steady <= _WARM:
                return self._run()
        for layer in self._watch:  # the graph itself advances the clocks
            layer.tick(layer.seen, layer.seen + 1)
        if self._graph is None:
            self._replay(self._capture())  # the capture runs the step's Python once, so that the layers have counted it
        else:
            self._replay(self._graph)  # until its last graph is launched
            for layer in self._layers:  # while the device is at work
                layer.count_step()
            for layer in self._watch:
                layer.clock.passed()
        for layer in self._frozen:
            layer.take_spares()
        self._known = self._layers[0].era, self._layers[0].seen
        return self._logits

    def _replay(self, recording: Recording) -> None:
        try:
            recording.replay()
        except BaseException:  # between the slots that the host gave and the graph that fetches
            for layer in self._frozen:
                if layer.chooses and layer.group is not None:
                    layer.group.forget_slots()
            raise

    def _prepare(self) -> None:
        for layer in self._layers:
            layer.before_step()
        self._owing = False
        addresses = tuple(tensor.data_ptr() for layer in self._layers for tensor in layer.tensors())
        if addresses != self._addresses:
            if self._graph is not None:
                _log.info("what the captured step reads has moved; decoding eagerly until it is steady")
            self._graph, self._addresses, self._steady = None, addresses, 0

    def _run(self) -> Tensor:
        # A mask of four dimensions is taken as it is, so that a compiled forward asks for no length; the layers know their padding.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._ids.device) if self.compiled else None
        with serving(self.cache):
            out = self._forward(
                input_ids=self._ids,
                position_ids=self._positions,
                past_key_values=self.cache,
                use_cache=True,
                attention_mask=mask,
            )
        logits: Tensor = out.logits
        return logits

    def _capture(self) -> Recording:
        begin, device = time.perf_counter(), self._ids.device
        with _uncollected(), Recording() as recording:
            before = torch.cuda.memory_reserved(device)
            with self.cache.pipeline.records(recording):
                self._logits = self._run()
        self._graph = recording
        self.captures += 1
        self.capture_bytes = torch.cuda.memory_reserved(device) - before
        self.capture_seconds += time.perf_counter() - begin
        return recording

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied cache captures anew."""
