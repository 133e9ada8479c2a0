"""Save named prompts of a prefix cache in a folder, for the next process."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvthaw.cache.prefix import PrefixCache
from kvthaw.cache.prefix_kept import Entry, Key
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.folders import OWN, clean, delete_folder
from kvthaw.engine.hf.saving import Part, check_header, index_kind, layer_part, read_layers, write_folder
from kvthaw.errors import CacheError
from kvthaw.names import ALLOWED, is_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collected:
    """A consistent copy of an entry, to be written."""

    key: Key
    entry: Entry
    header: Mapping[str, Any]
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Identity of an entry's folder, which changes with every save.

    parent: device and inode of the parent folder.
    """

    inode: int
    time: int
    parent: tuple[int, int]


class Library:
    """A folder with a saved cache for each entry of a prefix cache, which `Cache.load` can read. Processes may share it.

    An entry without salt has a folder of its name, others NAME@SALT. Make one call at a time per name. Calls that change
    memory belong on the thread that owns the prefix cache; write() and delete() may run on any thread.

    cache: model and settings for restored entries.
    leaves_room: as for `PrefixCache.keep`.
    """

    def __init__(self, cache: Cache, prefix: PrefixCache, folder: Path, leaves_room: Callable[[], bool] = lambda: True) -> None:
        self.cache, self.prefix, self.folder, self._leaves_room = cache, prefix, folder, leaves_room
        self._stamps: dict[Key, _Stamp | None] = {}  # each entry's folder when it was last read or saved
        self._saved: dict[Key, Entry] = {}  # entries that are in the folder

    def restore(self, read: Callable[[Any], Any] = lambda about: about) -> None:
        """Load all entries of the folder, as refresh() does, and delete leftovers of a process that was killed during a save.

        Creates the folder, and warns if it cannot be written.
        """
        try:
            self.folder.mkdir(OWN, parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(prefix=".", dir=self.folder))
        except OSError as error:
            _log.warning("%s cannot be written: %s; new documents are in memory alone", self.folder, error.strerror)
        clean(self.folder)
        try:
            found = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        except OSError as error:
            _log.warning("%s cannot be read: %s; its documents have to be prefilled again", self.folder, error.strerror)
            return
        for each in found:
            name, _, salt = each.partition("@")
            if is_name(name):
                self.refresh((salt, name), read)
            else:
                _log.warning("%r is left out: its name must be %s; rename the folder", str(self.folder / each), ALLOWED)

    def changed(self, key: Key) -> bool:
        """Return whether another process has saved or deleted an entry since it was last read or saved here."""
        return self._stamp(key) != self._stamps.get(key)

    def refresh(self, key: Key, read: Callable[[Any], Any] = lambda about: about) -> None:
        """Load an entry that is new to this process, or forget one that has left the folder.

        An entry that cannot be loaded is skipped with a warning, and tried again the next time.

        read: makes an entry's `about` from the saved one.
        """
        salt, name = key
        stamp = self._stamp(key)
        if stamp is None:
            if key in self.prefix.entries:
                self.prefix.forget(name, salt)
            self._stamps.pop(key, None)
            self._saved.pop(key, None)
            return
        try:
            self._take_up(key, read)
        except Exception as error:  # a server must start whatever the folder contains
            known = isinstance(error, CacheError | MemoryError | OSError)
            says = str(error) if known else f"{self._path(key)} cannot be loaded ({type(error).__name__})"
            _log.warning("%s; it has to be prefilled again", says)  # not the error itself, which holds the data read
        else:
            self._stamps[key], self._saved[key] = stamp, self.prefix.entry(name, salt)

    def collect(self, key: Key) -> Collected | None:
        """Return a copy of an entry for write(); None if there is no such entry or the folder has it.

        Call this on the thread that owns the prefix cache.
        """
        entry, kv = self.prefix.entries.get(key), self.cache.kv
        if entry is None or self._saved.get(key) is entry:
            return None
        updaters = {layer.number: layer.updater for layer in kv.offloaded}
        kept, parts = self.prefix.snapshots(kv, entry), list[Part]()
        for number, shape, rows in self.prefix.rows(entry):
            states, queries = {0: kept.get(number)}, {0: shape.queries[0]}
            parts.append(layer_part(number, shape.scale, updaters.get(number), states, rows={0: rows}, queries=queries))
        said = {"left_pad": [0], "token_ids": [entry.ids.tolist()], "tenant": entry.salt, "about": entry.about}
        return Collected(key, entry, index_kind(kv) | said, parts)

    def write(self, what: Collected) -> None:
        """Write an entry and replace its folder; on any thread. Raises OSError, with the old folder unchanged."""
        write_folder(self.cache.model, self._path(what.key), what.header, what.parts)
        self._stamps[what.key], self._saved[what.key] = self._stamp(what.key), what.entry

    def save(self, name: str, salt: str = "") -> None:
        """Write an entry if the folder lacks it. Logs a folder that cannot be written."""
        if (what := self.collect((salt, name))) is not None:
            try:
                self.write(what)
            except OSError as error:
                _log.warning("%s; it will have to be prefilled again after a restart", error)

    def holds(self, key: Key) -> bool:
        """Return whether a folder for a name exists, even a damaged one."""
        return self._path(key).is_dir()

    def delete(self, key: Key) -> None:
        """Delete an entry's folder, if there is one; on any thread. Raises OSError if files remain."""
        delete_folder(self._path(key))
        self._stamps.pop(key, None)
        self._saved.pop(key, None)

    # Inside

    def _take_up(self, key: Key, read: Callable[[Any], Any]) -> None:
        salt, name = key
        path, kv = self._path(key), self.cache.kv
        header = check_header(self.cache.model, path)
        if header.get("salt"):
            raise CacheError(f"{path} is of an earlier version, with its cache_salt in plain text")
        if header.get("tenant", "") != salt:
            raise CacheError(f"{path} was saved under another name or cache_salt")
        if len(header["token_ids"]) != 1 or header["left_pad"] != [0]:
            raise CacheError(f"{path} has {len(header['token_ids'])} rows, padded by {header['left_pad']}; an entry has one")
        about = read(header.get("about"))
        layers = dict(read_layers(path, header, kv, self.cache.model.device))
        rows = {number: (own.shape, own.states[0].blocks) for number, own in layers.items()}
        kept = {number: index for number, own in layers.items() if (index := own.states[0].index) is not None}
        ids = torch.tensor(header["token_ids"][0])
        how: dict[str, Any] = {"salt": salt, "indexes": kept, "about": about, "leaves_room": self._leaves_room}
        try:
            self.prefix.restore(kv, name, ids, rows, **how)
        finally:
            for own in layers.values():
                own.release()

    def _path(self, key: Key) -> Path:
        salt, name = key
        return self.folder / (f"{name}@{salt}" if salt else name)

    def _stamp(self, key: Key) -> _Stamp | None:
        """Return an entry's stamp; None if it has no folder.

        If the folder cannot be read, or its parent is another one (for example, nothing is mounted), returns the known
        stamp.
        """
        known = self._stamps.get(key)
        try:
            parent = self.folder.stat()
        except OSError:
            return known
        home = parent.st_dev, parent.st_ino
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return None if known is None or known.parent == home else known
        except OSError:
            return known
        return _Stamp(found.st_ino, found.st_mtime_ns, home)
