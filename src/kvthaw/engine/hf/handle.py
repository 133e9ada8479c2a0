"""Attach a model: from then on its own generate() thaws."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from kvthaw.engine.decode import replaying
from kvthaw.engine.hf.attention import check_model, give_back_attention
from kvthaw.engine.hf.cache import Cache, Stats
from kvthaw.engine.hf.hooks import foresee_no_longer
from kvthaw.engine.hf.layer import CacheLayer
from kvthaw.engine.prefill import CHUNK, in_chunks
from kvthaw.errors import CacheError, at_least
from kvthaw.types import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTACHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models with an open handle."""


def is_attached(model: PreTrainedModel) -> bool:
    """Whether a model has an open handle."""
    return model in _ATTACHED


class Handle:
    """An attached model. Every generate() or forward() that would make a plain cache gets a kvthaw cache instead."""

    def __init__(self, model: PreTrainedModel, make: Callable[[], Cache], capture: bool, compiled: bool, chunk: int) -> None:
        self._model: PreTrainedModel | None = model
        self._make = make
        self._cache: Cache | None = None
        _ATTACHED.add(model)
        self._hook = model.register_forward_pre_hook(self._supply, with_kwargs=True)
        step = replaying(model.forward, self._behind, compiled=compiled) if capture else None
        model.forward = in_chunks(model.forward, self._behind, chunk, short=step)

    @property
    def cache(self) -> Cache:
        """The cache of the latest generate(). Raises CacheError before the first and after detach."""
        self._open()
        if self._cache is None:
            raise CacheError("nothing was generated yet")
        return self._cache

    def stats(self) -> Stats:
        """Stats of the latest generate()'s cache."""
        return self.cache.stats()

    def detach(self) -> None:
        """Give the model its own attention and caches back."""
        model = self._open()
        self._hook.remove()
        del model.forward
        foresee_no_longer(model)
        give_back_attention(model)
        _ATTACHED.discard(model)
        self._model = self._cache = None

    def __enter__(self) -> Handle:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self.detach()

    def _open(self) -> PreTrainedModel:
        if self._model is None:
            raise CacheError("this handle is closed; attach the model again")
        return self._model

    def _behind(self, given: Any) -> Cache | None:
        """The cache whose layers a past_key_values has."""
        if isinstance(given, Cache):
            return given
        ours = self._cache is not None and getattr(given, "layers", None) is self._cache.layers
        return self._cache if ours else None

    def _supply(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("past_key_values")
        if given is None:
            config = module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
            use = kwargs.get("use_cache")
            if not (getattr(config, "use_cache", True) if use is None else use):
                return None
            self._cache = self._make()
            return args, {**kwargs, "past_key_values": self._cache}
        if type(given) is DynamicCache:
            if getattr(given, "offloading", False):
                raise CacheError("cache_implementation='offloaded' does not go with kvthaw, which offloads by itself")
            if given.get_seq_length() == 0 and not any(isinstance(layer, CacheLayer) for layer in given.layers):
                self._cache = self._make()
                for i, layer in enumerate(given.layers):  # those that are not kvthaw's may have been prepared already
                    if not isinstance(self._cache.layers[i], CacheLayer):
                        self._cache.layers[i] = layer
                given.layers = self._cache.layers  # generate() keeps its own object; from here on the two are one
        elif isinstance(given, Cache):
            self._cache = given
        else:
            raise CacheError(f"past_key_values is a {type(given).__name__}; kvthaw works with its own Cache or a DynamicCache")
        return None


def attach(
    model: PreTrainedModel,
    method: str | Method = "icecache",
    *,
    budget: int | float | None = None,
    retrieved: int | None = None,
    dense_layers: int | None = None,
    seed: int = 0,
    sparse_queries: int = 16,
    extent: int = 1024,
    host_bytes: int | None = None,
    prefill_chunk: int = CHUNK,
    capture: bool = True,
    compile: bool = False,
    **options: Any,
) -> Handle:
    """Let a model attend to a frozen context: from now on plain generate() and pipeline() thaw only what each step needs.

    Arguments as for `Cache`. prefill_chunk: the most tokens of a prompt that go through the model at once; those before are
    streamed back from the host, so the device's memory does not depend on the prompt's length (but for dense_layers, and what an
    index keeps there). capture: on a GPU, replay decoding steps as a captured CUDA graph, or as several with the host's
    searches between them; steps that cannot be captured, and everything on a CPU, run eagerly, and the logger kvthaw.engine.decode
    is told why. compile: the step is compiled by torch.compile first (a minute or more, once), with a warning where it cannot be.
    Returns a handle, also a context manager; handle.detach() undoes everything.

    Example: ``with kvthaw.attach(model, "icecache", budget=256): model.generate(**inputs)``
    """
    check_model(model)
    if is_attached(model):
        raise CacheError("the model is attached already; detach its handle first")
    at_least(1, prefill_chunk=prefill_chunk)
    before = model.config._attn_implementation

    def make() -> Cache:
        return Cache(
            model,
            method,
            budget=budget,
            retrieved=retrieved,
            dense_layers=dense_layers,
            seed=seed,
            sparse_queries=sparse_queries,
            extent=extent,
            host_bytes=host_bytes,
            **options,
        )

    try:
        make()  # refuse bad settings now, not at the first token
    except Exception:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        raise
    return Handle(model, make, capture, compile, prefill_chunk)
