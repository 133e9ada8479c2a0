"""Sampling settings that a model's generation config recommends."""

from __future__ import annotations

import logging
from typing import Any

from kvthaw.engine.sampling import Sampling
from kvthaw.errors import ConfigError

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def recommended(model: Any) -> dict[str, float]:
    """Return the `Sampling` settings in a model's generation config, by name. Values out of range are logged and left out."""
    config, found = getattr(model, "generation_config", None), dict[str, float]()
    said = {} if config is None else config.to_diff_dict()
    for name in _NAMES:
        value = said.get(name)
        if value is None or (name == "top_k" and value in (0, -1)):  # all tokens
            continue
        try:
            Sampling(**{name: value})
        except ConfigError as error:
            _log.warning("a value in the model's generation config is ignored: %s", error)
        else:
            found[name] = value
    return found


def as_generate_does(model: Any) -> dict[str, float]:
    """Return the settings with which transformers' `generate()` samples from a model. It is greedy unless do_sample is set."""
    found = recommended(model)
    if getattr(getattr(model, "generation_config", None), "do_sample", None):
        return {"temperature": 1.0} | found
    return {name: value for name, value in found.items() if name == "repetition_penalty"}


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a generation, from the generation config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
