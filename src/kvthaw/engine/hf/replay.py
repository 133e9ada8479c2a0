"""Replay decode steps of one token where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvthaw.engine.graph_runner import ElasticGraph, capturable
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE

_log = logging.getLogger(__name__)
_PLAIN = {"input_ids", "position_ids", CACHE, "attention_mask", "use_cache", "logits_to_keep", "return_dict"}


class Replay:
    """Replay an attached model's steps of one token where possible.

    The log says once why steps are not replayed.

    forward: the model's.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._told = forward, set[str]()

    def step(self, given: Mapping[str, Any], cache: Cache) -> CausalLMOutputWithPast | None:
        """Return the output of a step of one token.

        Returns None for a forward that must run eagerly: of a prompt or several tokens, or with a request for hidden states
        or attentions, or given embeddings.

        given: the arguments of forward, by name.
        """
        ids, sequences = given.get("input_ids"), cache.kv.sequences
        starts = sequences.padded_length in (0, *sequences.left_pad)  # a row has no token yet
        if ids is None or ids.shape[1] != 1 or starts or any(given[name] is not None for name in given.keys() - _PLAIN):
            return None
        if cache.replay is None or cache.reordered:
            reason = "beams change places between steps" if cache.reordered else capturable(cache)
            if not ids.is_cuda:
                reason = "the model is on a CPU"
            if reason is not None:
                if reason not in self._told:
                    self._told.add(reason)
                    _log.info("steps are taken eagerly: %s", reason)
                return None
            cache.replay = ElasticGraph(self._forward, cache)
        if given.get("attention_mask") is not None:
            cache.check_mask(given["attention_mask"])  # the captured step takes none
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.tensor([[sequences.length(seq)] for seq in range(sequences.count)], device=ids.device)
        logits = cache.replay(ids, positions).clone()  # the next replay writes over its own
        return CausalLMOutputWithPast(logits=logits, **{CACHE: given[CACHE]})
