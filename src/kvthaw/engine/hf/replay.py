"""Replay decode steps of one token where possible, and call the model otherwise."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvthaw.engine.graph_runner import GraphRunner, capturable, compilable, compiled_step
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE

_log = logging.getLogger(__name__)
_PLAIN = {"input_ids", "position_ids", CACHE, "attention_mask", "use_cache", "logits_to_keep", "return_dict"}


def replaying(
    forward: Callable[..., Any],
    cache_of: Callable[[Any], Cache | None],
    *,
    compiled: bool,
    eager: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap a model's forward so that it replays steps of a single token where possible.

    Everything else goes to `eager`: prompts, several tokens at once, requests for hidden states or attentions, given
    embeddings. The log says once why steps are not replayed, as a warning if compiled steps were requested and they run
    eagerly.

    cache_of: returns the kvthaw cache behind a past_key_values, or None.
    compiled: see compiled_step. Steps that cannot be captured are compiled if that is possible.
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
        cache = cache_of(kwargs.get(CACHE))
        extra = set(kwargs) - _PLAIN
        if (
            cache is None
            or ids is None
            or ids.shape[1] != 1
            or cache.kv.sequences.padded_length in (0, *cache.kv.sequences.left_pad)  # a row has no token yet
            or any(kwargs[name] is not None for name in extra)
        ):
            return eager(*args, **kwargs)
        if cache.replay is None or cache.reordered:
            reason = "beams change places between steps" if cache.reordered else capturable(cache)
            if not ids.is_cuda:
                reason = "the model is on a CPU"
            if reason is not None:
                if not (compiled and ids.is_cuda and not cache.reordered and compilable(cache) is None):
                    tell("taken eagerly", reason, logging.WARNING if compiled else logging.INFO)
                    return eager(*args, **kwargs)
                tell("compiled, not captured", reason, logging.INFO)
            cache.replay = GraphRunner(single, cache, compiled=compiled, capture=reason is None)
        if kwargs.get("attention_mask") is not None:
            cache.check_mask(kwargs["attention_mask"])  # the captured step takes none
        positions = kwargs.get("position_ids")
        if positions is None:
            sequences = cache.kv.sequences
            positions = torch.tensor([[sequences.length(seq)] for seq in range(sequences.count)], device=ids.device)
        logits = cache.replay(ids, positions).clone()  # the next replay writes over its own
        return CausalLMOutputWithPast(logits=logits, **{CACHE: kwargs[CACHE]})

    return step
