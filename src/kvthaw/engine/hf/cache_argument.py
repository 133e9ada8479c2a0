"""The name of the argument, and of the output, by which transformers' models take and return a cache."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

_OLD = "past_key_values"
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else _OLD
"""From transformers 5.24 on "cache", before "past_key_values"."""


def pop_cache(given: MutableMapping[str, Any]) -> Any:
    """Remove the cache from a forward's arguments and return it, or None. It may have the old name, too."""
    old, new = given.pop(_OLD, None), given.pop(CACHE, None)
    return old if new is None else new
