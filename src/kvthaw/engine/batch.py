"""A running batch that requests join and leave between steps: what a serving loop stands on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvthaw.engine.decode import Replay, capturable, compilable, compiled_step
from kvthaw.engine.hf import Cache, Stats
from kvthaw.engine.hf.attention import unwrap
from kvthaw.engine.hf.handle import is_attached
from kvthaw.engine.hf.hooks import turns_by_length
from kvthaw.engine.prefill import CHUNK, spans
from kvthaw.engine.sampling import GREEDY, Sampling, draw
from kvthaw.errors import CacheError, ConfigError, UnsupportedModelError, at_least
from kvthaw.typecheck import check_type
from kvthaw.types import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what is generated after it.

    lane: its place in the batch while it is there. prompt: its tokens; tokens: those generated so far. finished: None while more
    will come; "stop" after a stop token (which is the last of tokens), "length" at its limit, "left" where it was taken out,
    "failed" where a step broke off that some layers had taken and others had not.
    """

    lane: int
    prompt: int
    limit: int
    stop: frozenset[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    finished: Literal["stop", "length", "left", "failed"] | None = None

    def _take(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop:
            self.finished = "stop"
        elif len(self.tokens) == self.limit:
            self.finished = "length"


class Batch:
    """Up to `lanes` requests decoded together, each of its own length; they join and leave between steps.

    Everything that a step reads is allocated for `capacity` tokens a lane when the first joins and stays where it is, so that on a
    GPU one captured step (see kvthaw.engine.decode) serves all, whoever is in the batch. Each request's
    tokens are those that it would get alone. One that finishes leaves by itself.

    model: as for `Cache`; all its layers must be full attention. method, and the settings budget, retrieved, dense_layers, seed,
    extent and host_bytes: as for `Cache`; a budget is a number of tokens, for a fraction of the prompt would differ from
    one to the next. prefill_chunk, capture, compile: as for `attach`.

    Raises ConfigError for a setting out of range, UnsupportedModelError for a model that cannot work and CacheError for one that
    is attached.

    Example::

        batch = kvthaw.Batch(model, "pariskv", lanes=8, capacity=32768, budget=512)
        waiting = [...]  # prompts: token ids
        while waiting or batch.requests:
            while waiting and batch.free:
                batch.join(waiting.pop(), max_new_tokens=200)
            for request in batch.step():
                print(request.lane, request.tokens[-1], request.finished)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "icecache",
        *,
        lanes: int,
        capacity: int,
        prefill_chunk: int = CHUNK,
        capture: bool = True,
        compile: bool = False,
        **settings: Any,
    ) -> None:
        check_type(int, lanes=lanes, capacity=capacity, prefill_chunk=prefill_chunk)
        at_least(1, lanes=lanes, capacity=capacity, prefill_chunk=prefill_chunk)
        if isinstance(settings.get("budget"), float):
            raise ConfigError(f"budget is {settings['budget']}; a batch needs a number of tokens, no fraction of a prompt")
        model = unwrap(model)
        if is_attached(model):
            raise CacheError("the model is attached; detach its handle first")
        _check(model, capacity)
        self.capacity, self.prefill_chunk = capacity, prefill_chunk
        self.cache = Cache(model, method, **settings)
        if len(self.cache.kv_layers) != len(self.cache.layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers that are not full attention; a batch of lanes does not serve those"
            )
        self._model = model
        self._lanes: list[Request | None] = [None] * lanes
        for kv in self.cache.kv_layers:
            kv.room = capacity
            kv.set_lengths([0] * lanes, range(lanes))
        self._forward = compiled_step(model.forward) if compile else model.forward
        self._compile, self._capture = compile, capture and model.device.type == "cuda"

    @property
    def requests(self) -> list[Request]:
        """Those that are in the batch, by lane."""
        return [request for request in self._lanes if request is not None]

    @property
    def lanes(self) -> int:
        """How many requests there is room for."""
        return len(self._lanes)

    @property
    def free(self) -> int:
        """How many more can join."""
        return self._lanes.count(None)

    def stats(self) -> Stats:
        """Stats of the batch's cache, over all requests so far."""
        return self.cache.stats()

    def join(
        self,
        prompt: Tensor | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: int | Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
    ) -> Request:
        """Prefill a prompt in a free lane and choose its first token.

        prompt: token ids, at least one, [T] or [1, T]. max_new_tokens: None for as many as the capacity holds. stop: tokens that
        end it, None for those of the model's generation config. Returns the request with its first token, which may be all
        that it wanted.

        Raises CacheError where no lane is free and ConfigError for a prompt that does not fit or has ids that are no tokens of the
        model's; then, and where the prefill itself fails, the batch is as it was.
        """
        if not self.free:
            raise CacheError(f"all {len(self._lanes)} lanes are taken; one must leave first")
        if isinstance(prompt, str):
            raise ConfigError(f"the prompt is text, {prompt[:20]!r}; it must be token ids, as a tokenizer makes them")
        ids = torch.as_tensor(prompt, dtype=torch.int64, device=self._model.device).reshape(1, -1)
        tokens = ids.shape[1]
        limit = self.capacity - tokens if max_new_tokens is None else max_new_tokens
        if tokens < 1:
            raise ConfigError("the prompt is empty")
        if limit < 1 or tokens + limit > self.capacity:
            raise ConfigError(
                f"the prompt has {tokens} tokens and max_new_tokens is {max_new_tokens}; a lane has room for {self.capacity} in all"
            )
        words = self._model.config.get_text_config(decoder=True).vocab_size
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= words:  # on a GPU the whole batch would be lost
            raise ConfigError(f"the prompt has token ids from {least} to {most}; the model's are 0 to {words - 1}")
        request = Request(self._lanes.index(None), tokens, limit, self._stops(stop), sampling)
        layers = self.cache.kv_layers
        self.cache.wait()
        self._clear(request.lane)  # steps that it took part in as an empty lane leave traces too
        try:
            logits = self._prefill(request.lane, ids)
            self.cache.wait()
        except BaseException:
            for kv in layers:
                kv.recover()
            self._clear(request.lane)
            raise
        self._lanes[request.lane] = request
        request._take(int(draw(logits, [sampling], torch.tensor([tokens], device=ids.device))[0]))
        if request.finished:
            self._release(request)
        return request

    def step(self) -> list[Request]:
        """One token for every request, which is the last of its tokens; returns them. Those that finished have left.

        What a step raises comes up. It can be taken again, unless it broke off between layers: then all requests have left, with
        the tokens that they had."""
        requests = self.requests
        if not requests:
            return []
        device = self._model.device
        at = [(request.tokens[-1], request.prompt + len(request.tokens) - 1) if request else (0, 0) for request in self._lanes]
        ids, positions = torch.tensor(at, device=device)[:, :, None].unbind(1)
        with torch.no_grad():
            logits = self._logits(ids, positions)
            how = [request.sampling if request else GREEDY for request in self._lanes]
            drawn = draw(logits, how, positions[:, 0] + 1)
        self._replay.go_ahead()
        tokens = drawn.tolist()
        for request in requests:
            request._take(tokens[request.lane])
            if request.finished:
                self._release(request)
        return requests

    def leave(self, request: Request) -> None:
        """Take a request out before it has finished. Raises CacheError for one that is not in the batch."""
        if request.finished or self._lanes[request.lane] is not request:
            raise CacheError(f"the request of lane {request.lane} is not in the batch any longer")
        request.finished = "left"
        self._release(request)

    # Inside

    def _prefill(self, lane: int, ids: Tensor) -> Tensor:
        """The logits [1, V] after a prompt [1, T] that goes to a lane, in chunks where it is long."""
        tokens, view = ids.shape[1], self.cache.at_lane(lane)
        some = {"logits_to_keep": 1} if self._model._supports_logits_to_keep() else {}
        chunk = (
            tokens if self.cache.settings.method.evicts else self.prefill_chunk
        )  # what is dropped cannot be attended to again
        logits = torch.empty(0)
        try:
            for start, stop in spans(tokens, chunk):
                for kv in self.cache.kv_layers:
                    kv.expect(tokens - start)
                with torch.no_grad():
                    logits = self._model(ids[:, start:stop], past_key_values=view, use_cache=True, **some).logits[:, -1]
                self._tell(lane, stop)
        finally:
            for kv in self.cache.kv_layers:
                kv.expect(0)
        return logits

    @property
    def _replay(self) -> Replay:
        cache = self.cache
        if cache.replay is None:
            forward, compiled = self._forward, self._compile
            if compiled and (reason := compilable(cache)) is not None:
                _log.warning("steps are not compiled: %s", reason)
                forward, compiled = self._model.forward, False
            captured = self._capture and capturable(cache) is None
            cache.replay = Replay(forward, cache, compiled=compiled, capture=captured)
        return cache.replay

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[lanes, V] after one token a lane."""
        try:
            return self._replay(ids, positions)[:, -1]
        except BaseException:
            if self._replay.interrupted:
                for kv in self.cache.kv_layers:
                    kv.recover()
                for request in self.requests:
                    request.finished = "failed"
                    self._release(request)
            raise

    def _release(self, request: Request) -> None:
        self._lanes[request.lane] = None
        self._clear(request.lane)

    def _clear(self, lane: int) -> None:
        for kv in self.cache.kv_layers:
            kv.clear(lane)
        self._tell(lane, 0)

    def _tell(self, lane: int, tokens: int) -> None:
        """A lane has so many tokens now, in every layer."""
        layers = self.cache.kv_layers
        lengths = [layers[0].length(other) for other in range(len(self._lanes))]
        lengths[lane] = tokens
        idle = [other for other, n in enumerate(lengths) if n == 0]
        for kv in layers:
            kv.set_lengths(lengths, idle)

    def _stops(self, stop: int | Sequence[int] | None) -> frozenset[int]:
        if stop is None:
            stop = getattr(self._model.generation_config, "eos_token_id", None)
        return frozenset(() if stop is None else [stop] if isinstance(stop, int) else stop)


def _check(model: PreTrainedModel, capacity: int) -> None:
    """Refuse models whose positions end before the capacity, or depend on the rest of the batch."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise ConfigError(f"capacity is {capacity}; the model's positions end at {limit}")
    kind = turns_by_length(model)
    if kind is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} turns its keys by the longest row of a batch ({kind} positions); none can join it"
        )
