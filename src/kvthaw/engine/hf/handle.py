"""Attach a model, so that its own generate() uses kvthaw."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvthaw.cache.index_api import Method
from kvthaw.cache.plan import Settings
from kvthaw.cache.prefix import PrefixCache
from kvthaw.cache.stats import Stats
from kvthaw.config import CacheConfig, KvDtype
from kvthaw.engine.hf.attention import attends, give_back_attention, unwrap
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE, pop_cache
from kvthaw.engine.hf.chunks import columns_of, default_chunk, drafted, in_chunks, may_reuse, new_tokens
from kvthaw.engine.hf.fused import fused, fusing
from kvthaw.engine.hf.layer import CacheLayer
from kvthaw.engine.hf.prefill_progress import PrefillProgress, Tell
from kvthaw.engine.hf.replay import Replay
from kvthaw.errors import CacheError, at_least
from kvthaw.method_names import AUTO
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
_BEHIND = "_kvthaw_cache"
"""The attribute of a DynamicCache that holds the kvthaw cache whose layers it has. A copy of the DynamicCache has its own."""
_ATTACHED = "_kvthaw_attached"
"""The attribute of an attached model that holds its Forward. Another wrapper may hide it as the model's `forward`."""
_ANSWER = 256
"""New tokens, besides the prompt's, for which auto chooses its method."""
_WITHOUT = "kvthaw was off: the latest call had no cache (use_cache=False), and its attention was dense"
_UNUSED = (
    "kvthaw was off: the model left its cache empty in the latest call, as gradient checkpointing in train mode does; "
    "model.eval() turns that off"
)


class Forward:
    """The forward of an attached model: it supplies a kvthaw cache, splits long prompts into chunks and replays decode steps.

    It is set in the model's __dict__ and calls the former instance forward, or the class's. A copy of the model is not
    attached. Threads may call it concurrently. Each call uses its own cache. One call runs at a time, since calls share the
    model's hooks, the prefix cache and the device's captures.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make: Callable[[tuple[int, int, int] | None], Cache],
        settings: Settings,
        capture: bool,
        chunk: int,
        prefix: PrefixCache | None,
        progress: Tell | None,
    ) -> None:
        self.model, self.make, self.settings = model, make, settings
        self.cache: Cache | None = None  # the latest call's, if it had one
        self.off: str | None = None  # why the latest call had none
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()  # caches that calls used
        self._turn = threading.RLock()
        self._warned = False
        self.handle: Callable[[], Handle | None] = lambda: None
        self.attached = True
        self.own = vars(model).get("forward")
        of_class = types.MethodType(type(model).forward, model)
        self.__signature__ = inspect.signature(of_class)  # generate() looks at it
        self._multimodal = model.config.get_text_config(decoder=True) is not model.config
        self._names = list(self.__signature__.parameters)
        forward = of_class if self.own is None else self.own
        if hasattr(forward, "_torchdynamo_orig_callable"):
            _log.warning(
                "model.forward is compiled by torch.compile; while attached the model runs without it, and decode steps are "
                "captured"
            )
            forward = forward._torchdynamo_orig_callable
        self._plain, self._chunk, self._prefix = forward, chunk, prefix
        self._told = PrefillProgress(model, progress)
        self._replay = Replay(fusing(model, forward)) if capture else None
        model.forward = self

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled module breaks its graph here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attached:  # called by a wrapper that was added later
            return self._plain(*args, **kwargs)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not given.get("mm_encoder_outputs", True):  # generate() passes {} with text alone
            del given["mm_encoder_outputs"]
        kinds = given.get("token_type_ids")
        if kinds is not None and self._multimodal and not kinds.any():  # all text: it would only request a mask
            del given["token_type_ids"]
        cache = self._supplied(pop_cache(given), given)
        behind = _behind(cache)
        with self._turn:
            self.off = _WITHOUT if behind is None else None
            if behind is not None:
                self.cache = behind
                self._caches.add(behind)
            self._warn(given)
            given[CACHE] = cache
            if behind is None:
                return self._whole(**given)
            out = self._from_prefix(given, behind)
            if not behind.kv.sequences.padded_length:
                self.off = _UNUSED
            return out

    def _warn(self, given: dict[str, Any]) -> None:
        """Log once that attention weights were requested and are not returned."""
        asked = given.get("output_attentions")
        if not self._warned and (getattr(self.model.config, "output_attentions", False) if asked is None else asked):
            _log.warning(
                "output_attentions=True has no effect: kvthaw's attention returns no weights; detach the model to get them"
            )
            self._warned = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return what a copy of the model has instead: a copy of the former instance forward, or the class's."""
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        twin = copy.deepcopy(self.model, memo)
        return types.MethodType(type(twin).forward, twin)

    def detach(self) -> None:
        """Restore the model's own forward and attention."""
        self.attached = False
        model = self.model
        if vars(model).get("forward") is self:
            if self.own is None:
                del model.forward
            else:
                model.forward = self.own
        give_back_attention(model)
        with self._turn:
            for cache in self._caches:
                cache.replay = None  # graphs hold the collectives of a split model
        self.cache = None

    def _from_prefix(self, given: dict[str, Any], cache: Cache) -> Any:
        """Run the forward of a call, of a prompt only the tokens after its cached prefix; the prompt is then cached."""
        if self._prefix is None or not may_reuse(given, cache, self._names):
            return self._in_parts(given, cache)
        ids = given["input_ids"]
        with torch.inference_mode(False), torch.no_grad():  # rows outlive the caller's mode
            taken = self._prefix.fill(cache.kv, ids[0])
        rest = {name: given[name].narrow(dim, taken, ids.shape[1] - taken) for name, dim in columns_of(given).items()}
        out = self._in_parts(given | rest, cache)
        cache.wait()
        with torch.inference_mode(False), torch.no_grad():
            self._prefix.keep(cache.kv, ids[0])
        return out

    def _in_parts(self, given: dict[str, Any], cache: Cache) -> Any:
        """Run the forward in chunks, or replay it. Candidates of assisted decoding do not count as prompt."""
        tokens, candidates = new_tokens(given), drafted(given, cache)
        with self._told.prompt(tokens - candidates):
            if tokens > self._chunk or candidates:
                return in_chunks(self._whole, given, cache, self._chunk, self._names)
            cache.reserve(tokens)  # before a layer that is not kvthaw's appends them
            out = None if self._replay is None else self._replay.step(given, cache)
            out = self._whole(**given) if out is None else out
            cache.check_finite()
            return out

    def _whole(self, **given: Any) -> Any:
        """Run the model's forward. If it raises, a kvthaw cache counts none of its tokens."""
        cache = _behind(given[CACHE])
        counted = nullcontext() if cache is None else cache.kv.counted_forward()
        with fused(self.model), self._told.part(new_tokens(given)), counted:
            return self._plain(**given)

    def _made(self, call: Mapping[str, Any]) -> Cache:
        """Return a new cache for the prompt of a call. The latest call's cache frees its memory first, unless somebody else
        holds it."""
        tokens = next((call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None), None)
        self.cache = None
        return self.make(None if tokens is None else (tokens.shape[0], tokens.shape[1], _ANSWER))

    def _supplied(self, given: Any, call: Mapping[str, Any]) -> Any:
        """Return the past_key_values for the model in place of `given`: a kvthaw cache, or a DynamicCache with its layers.

        call: the other arguments.
        """
        if given is None:
            config = self.model.config.get_text_config(decoder=True)
            use_cache = call.get("use_cache")
            if not (getattr(config, "use_cache", True) if use_cache is None else use_cache):
                return None
            given = self._made(call)
        elif isinstance(given, Cache):
            pass
        elif type(given) is not DynamicCache:
            raise CacheError(
                f"past_key_values is a {type(given).__name__}; kvthaw works with its own Cache or a DynamicCache: give one of "
                "them or none, and no cache_implementation"
            )
        elif getattr(given, "offloading", False):
            raise CacheError("cache_implementation='offloaded' does not go with kvthaw, which offloads by itself")
        elif not any(isinstance(layer, CacheLayer) for layer in given.layers):
            tokens = given.get_seq_length()
            if tokens:
                raise CacheError(
                    f"past_key_values is a DynamicCache that holds {tokens} tokens of another attention; attach the model before "
                    "the prompt, and give it an empty cache or none. Tokens of PEFT's prefix tuning are not served: detach the "
                    "model"
                )
            cache = self._made(call)
            cache.rolls_back = True  # it may: a DynamicCache does not say that it records
            for i, layer in enumerate(given.layers):  # layers that are not kvthaw's may have been prepared already
                if not isinstance(cache.layers[i], CacheLayer):
                    cache.layers[i] = layer
            given.layers = cache.layers  # generate() keeps its own object; both share the layers from here on
            setattr(given, _BEHIND, cache)
        return given


def _behind(given: Any) -> Cache | None:
    """Return the kvthaw cache whose layers a past_key_values has, or None."""
    cache: Cache | None = given if isinstance(given, Cache) else getattr(given, _BEHIND, None)
    return cache if cache is not None and given.layers is cache.layers else None


def _attachment(model: PreTrainedModel) -> Forward | None:
    found = vars(model).get(_ATTACHED)
    return found if isinstance(found, Forward) and found.model is model else None  # else of the model that this is a copy of


def is_attached(model: PreTrainedModel) -> bool:
    """Return whether a model, or the one inside a wrapper, has an open handle."""
    return _attachment(unwrap(model)) is not None


class Handle:
    """An attached model. Every generate() or forward() that would create a plain cache gets a kvthaw cache instead."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._last: Stats | None = None
        forward.handle = weakref.ref(self)
        vars(forward.model)[_ATTACHED] = forward

    @property
    def cache(self) -> Cache:
        """The cache of the latest generate(). Raises CacheError before the first and after detach."""
        self._open()
        if self._forward.cache is None:
            raise CacheError("nothing was generated yet")
        return self._forward.cache

    def stats(self) -> Stats:
        """Return statistics of the latest generate()'s cache; after detach, the statistics from before.

        If that call had no cache or left it empty, they are of an empty cache, and their `reason` says that kvthaw was off.
        """
        forward = self._forward
        if self._last is not None:
            return self._last
        if forward.off is not None:
            return replace(forward.make(None).stats(), reason=forward.off)
        if forward.cache is None:
            raise CacheError("nothing was generated yet")
        return forward.cache.stats()

    def detach(self) -> None:
        """Restore the model's own forward, attention and caches. The statistics stay. Does nothing the second time."""
        if not self._forward.attached:
            return
        forward = self._forward
        if forward.cache is not None or forward.off is not None:
            self._last = self.stats()
        vars(forward.model).pop(_ATTACHED, None)
        forward.detach()

    def __repr__(self) -> str:
        forward, name = self._forward, type(self._forward.model).__name__
        if not forward.attached:
            return f"<Handle of {name}, detached: {self._last or 'nothing was generated'}>"
        return f"<Handle of {name}: {forward.off or forward.cache or f'{forward.settings}; nothing was generated yet'}>"

    def __enter__(self) -> Handle:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _open(self) -> None:
        if not self._forward.attached:
            raise CacheError("this handle is closed; attach the model again")


def detach(model: PreTrainedModel) -> None:
    """Restore a model's own forward, attention and caches, if a handle or an explicit `Cache` replaced them."""
    model = unwrap(model)
    attachment = _attachment(model)
    if attachment is not None:
        (attachment.handle() or Handle(attachment)).detach()
    give_back_attention(model)


def attach(
    model: PreTrainedModel,
    method: str | Method = AUTO,
    *,
    budget: int | float | None = None,
    retrieved: int | float | None = None,
    dense_layers: int | None = None,
    seed: int = 0,
    sparse_queries: int = 16,
    block_size: int | None = None,
    host_bytes: int | None = None,
    device_memory: int | str | None = None,
    full_below: int | None = None,
    kv_dtype: KvDtype | None = None,
    prefill_chunk: int | None = None,
    capture: bool = True,
    prefix_cache: PrefixCache | None = None,
    progress: Tell | None = None,
    **options: Any,
) -> Handle:
    """Attend to an offloaded context: generate(), pipeline() and forward() of this model fetch only what each step needs.

    Arguments as for `Cache`. A wrapper (PEFT, DistributedDataParallel, a compiled module) is attached through the model
    inside.

    prefill_chunk: the most prompt tokens per forward; None: 16,384, or fewer on a small GPU. Earlier KV is streamed back from
        the host, so device memory does not grow with the prompt. Exceptions are dense_layers and an index on the device.
    capture: on a GPU, replay decode steps as one CUDA graph, or as several with host searches between them. Steps that
        cannot be captured, and all steps on a CPU, run eagerly; the logger kvthaw.engine.hf.replay says why.
    prefix_cache: prompts of one sequence start with their cached prefix, and are cached in it. A conversation that is
        generated turn by turn then prefills only new tokens; `Stats.cached_tokens` counts the others.
    progress: called as progress(done, total), in tokens, when a prompt begins and after every layer of every chunk. An
        error that it raises ends the call of the model.

    Continuations of up to sparse_queries tokens are decoded one by one through the index. Longer ones, such as the next
    question of a chat, attend to all of the KV, streamed back from the host; `Stats.dense_tokens` counts them. Candidates
    of assisted decoding always go through the index, and rejected ones leave no trace. The output is therefore the method's
    own, except for models whose layers share KV.

    Returns a handle, also a context manager; handle.detach() restores the model. If the handle is dropped the model stays
    attached. `kvthaw.detach(model)` then detaches it, and the next attach() replaces it. A copy of the model is not
    attached.

    Raises CacheError if a handle of the model is open, else as `Cache`.

    Example: ``with kvthaw.attach(model, "icecache-digest", budget=256): model.generate(**inputs)``
    """
    config, _ = CacheConfig.split(locals() | options)
    model = unwrap(model)
    check_type(int | None, prefill_chunk=prefill_chunk)
    check_type(PrefixCache | None, prefix_cache=prefix_cache)
    check_type(Callable | None, progress=progress)
    at_least(1, prefill_chunk=prefill_chunk)
    earlier = _attachment(model)
    if earlier is not None:
        if earlier.handle() is not None:
            raise CacheError("the model is attached already; detach its handle first")
        Handle(earlier).detach()
    served = attends(model)

    def make(sized_for: tuple[int, int, int] | None) -> Cache:
        return Cache(model, method, **{"sized_for": sized_for, "config": config} | options)

    try:
        settings = make(None).settings  # refuse bad settings now, not at the first token
    except Exception:
        if not served:
            give_back_attention(model)
        raise
    return Handle(Forward(model, make, settings, capture, prefill_chunk or default_chunk(model), prefix_cache, progress))
