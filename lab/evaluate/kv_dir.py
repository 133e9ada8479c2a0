"""A folder of saved caches, from which a prompt loads the one with the longest common prefix."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.kept import check_keeps, fill, keep, saved_tokens
from kvthaw.engine.text import common

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
        check_keeps(cache)
        for path in sorted(self.folder.glob("*")):
            if path not in self._ids and not path.name.startswith("."):
                self._ids[path] = saved_tokens(cache.model, path, self._warn)
        best = max(self._ids, key=lambda path: common(self._ids[path], ids), default=None)
        return 0 if best is None or not common(self._ids[best], ids) else fill(cache, best, ids, self._warn)

    def keep(self, cache: Cache, ids: Sequence[int], taken: int) -> None:
        """Save a prompt that a cache holds. Warns if the folder cannot be written.

        taken: tokens of the prompt that fill() loaded.
        """
        if 2 * taken < len(ids):
            name = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
            if keep(cache, self.folder / name, ids, self._warn):
                self._ids[self.folder / name] = list(ids)
