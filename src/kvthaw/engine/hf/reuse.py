"""Start the prompts of an attached model with their cached prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.chunks import columns_of, reason_for_one_pass


def reusing(
    forward: Callable[..., Any], cache_of: Callable[[Any], Cache | None], prefix: PrefixCache, *, names: Collection[str]
) -> Callable[..., Any]:
    """Wrap a forward that takes arguments by name, so that a prompt starts after its cached prefix, and is cached.

    This applies to the first prompt of a cache: one sequence without padding, at positions from 0 on, with only the last
    token's logits requested. It must also be a prompt that could go through in chunks.

    cache_of, names: as for in_chunks().
    """

    def take(**given: Any) -> Any:
        cache, ids, mask = cache_of(given.get(CACHE)), given.get("input_ids"), given.get("attention_mask")
        if cache is None or ids is None or len(ids) > 1 or ids.shape[1] == 1 or cache.kv.sequences.padded_length:
            return forward(**given)
        padded = isinstance(mask, torch.Tensor) and not bool(mask.all())
        if padded or given.get("logits_to_keep") != 1 or reason_for_one_pass(given, cache, names) is not None:
            return forward(**given)
        places = [given[name] for name in ("position_ids", "cache_position") if given.get(name) is not None]
        if not all(
            bool((each.cpu() == torch.arange(ids.shape[1])).all()) for each in places
        ):  # KV that other prompts do not have
            return forward(**given)
        with torch.inference_mode(False), torch.no_grad():  # rows outlive the caller's mode
            taken = prefix.fill(cache.kv, ids[0])
        rest = {name: given[name].narrow(dim, taken, ids.shape[1] - taken) for name, dim in columns_of(given).items()}
        out = forward(**{**given, **rest})
        cache.wait()
        with torch.inference_mode(False), torch.no_grad():
            prefix.keep(cache.kv, ids[0])
        return out

    return take
