"""A folder of saved caches, from which a prompt loads the one with the longest common prefix."""

from __future__ import annotations

import hashlib
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


class KvDir:
    """Keep the KV of one model's prompts in a folder, one saved cache each, so that a document is prefilled once.

    A prompt is saved if less than half of it could be loaded.

    warn: called with a message about folders that cannot be used.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] = _log.warning) -> None:
        self.folder, self._warn = folder, warn
        self._ids: dict[Path, list[int]] = {}

    def fill(self, cache: Cache, ids: Sequence[int]) -> int:
        """Fill an empty cache with the longest saved prefix of a prompt, without its last token. Returns its length.

        A folder that is damaged or of another model is ignored with a warning.
        """
        _check(cache)
        self.prompts(cache.model)
        best = max(self._ids, key=lambda path: common(self._ids[path], ids), default=None)
        return 0 if best is None or not common(self._ids[best], ids) else fill(cache, best, ids, self._warn)

    def prompts(self, model: PreTrainedModel) -> list[list[int]]:
        """Return the tokens of the saved prompts of a model."""
        for path in sorted(self.folder.glob("*")):
            if path not in self._ids and not path.name.startswith("."):
                self._ids[path] = saved_tokens(model, path, self._warn)
        return [ids for ids in self._ids.values() if ids]

    def keep(self, cache: Cache, ids: Sequence[int], taken: int) -> None:
        """Save a prompt that a cache holds. Warns if the folder cannot be written.

        taken: tokens of the prompt that fill() loaded.
        """
        if 2 * taken < len(ids):
            name = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
            if keep(cache, self.folder / name, ids, self._warn):
                self._ids[self.folder / name] = list(ids)


def fill(cache: Cache, path: Path, ids: Sequence[int], warn: Callable[[str], None] = _log.warning) -> int:
    """Fill an empty cache with a saved cache's prefix of a prompt; see KvDir.fill. Skips a saved cache if less than half of it
    is useful."""
    _check(cache)
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


def _check(cache: Cache) -> None:
    if cache.foreign:
        raise ConfigError(f"the model has a {cache.foreign[0]}, whose state cannot be kept")
