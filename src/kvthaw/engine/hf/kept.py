"""A prompt's KV in a folder: fill an empty cache with what another prompt shares with it, or save it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.saving import check_header, load, save
from kvthaw.engine.text import common
from kvthaw.errors import CacheError, ConfigError, HostMemoryError

_log = logging.getLogger(__name__)


def fill(cache: Cache, path: Path, ids: Sequence[int], warn: Callable[[str], None] = _log.warning) -> int:
    """Fill an empty cache with a saved cache's prefix of a prompt, without the prompt's last token. Returns its length.

    Skips a saved cache if less than half of it is useful. Ignores one that is damaged or of another model, with a warning.

    warn: called with the message.
    """
    check_keeps(cache)
    held = saved_tokens(cache.model, path, warn)
    kept = min(common(held, ids), len(ids) - 1)  # the last token gives the logits
    if kept <= 0 or 2 * kept < len(held):
        return 0
    try:
        load(cache.model, cache.kv, cache.layers, path)
        cache.keep(kept)  # layers whose window has moved past it refuse
    except (CacheError, HostMemoryError) as error:
        warn(f"{error}; the prompt is prefilled again")
        cache.reset()
        return 0
    return kept


def keep(
    cache: Cache, path: Path, ids: Sequence[int], warn: Callable[[str], None] = _log.warning, *, about: Any = None
) -> bool:
    """Save a prompt that a cache holds. Returns whether this succeeded; warns if not.

    about: see `saving.save`.
    """
    try:
        save(cache.model, cache.kv, cache.layers, path, torch.tensor(ids), about)
    except OSError as error:
        warn(f"{path}: {error.strerror}; the prompt is not kept")
        return False
    return True


def saved_tokens(model: PreTrainedModel, path: Path, warn: Callable[[str], None] = _log.warning) -> list[int]:
    """Return the tokens of a saved cache of one row; none if it is missing or unusable."""
    if not path.exists():
        return []
    try:
        rows: list[list[int]] = check_header(model, path)["token_ids"]
    except CacheError as error:
        warn(f"{error}; the prompt is prefilled again")
        return []
    return rows[0] if len(rows) == 1 else []


def check_keeps(cache: Cache) -> None:
    """Raise ConfigError if a cache has state that a folder cannot keep."""
    if cache.foreign:
        raise ConfigError(f"the model has a {cache.foreign[0]}, whose state cannot be kept")
