"""Save named prompts of a prefix cache in a folder, for the next process."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvthaw.cache.device_memory import uncollected
from kvthaw.cache.prefix import PrefixCache
from kvthaw.cache.prefix_kept import Entry, Key
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.folders import OWN, clean, delete_folder
from kvthaw.engine.hf.saving import check_header, index_kind, layer_part, read_layers, write_folder
from kvthaw.errors import CacheError
from kvthaw.names import ALLOWED, is_name

_log = logging.getLogger(__name__)


_Stamp = tuple[int, int, tuple[int, int]]
"""Identity of an entry's folder, which changes with every save: its inode and time, and the parent folder's device and inode."""


class Library:
    """A folder with a saved cache for each entry of a prefix cache, which `Cache.load` can read. Processes may share it.

    An entry without salt has a folder of its name, others NAME@SALT. Make one call at a time per name. Calls that change
    memory belong on the thread that owns the prefix cache. delete() and what collect() returns may run on any thread.

    cache: model and settings for restored entries.
    leaves_room: as for `PrefixCache.keep`.
    """

    def __init__(self, cache: Cache, prefix: PrefixCache, folder: Path, leaves_room: Callable[[], bool] = lambda: True) -> None:
        self.cache, self.prefix, self.folder, self._leaves_room = cache, prefix, folder, leaves_room
        self._known: dict[Key, tuple[_Stamp | None, Entry]] = {}  # each folder when it was last read or saved, and its entry

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
        return self._stamp(key) != self._known.get(key, (None,))[0]

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
            self._known.pop(key, None)
            return
        try:
            self._take_up(key, read)
        except Exception as error:  # a server must start whatever the folder contains
            known = isinstance(error, CacheError | MemoryError | OSError)
            says = str(error) if known else f"{self._path(key)} cannot be loaded ({type(error).__name__})"
            _log.warning("%s; it has to be prefilled again", says)  # not the error itself, which holds the data read
        else:
            self._known[key] = stamp, self.prefix.entry(name, salt)

    def collect(self, key: Key) -> Callable[[], None] | None:
        """Return a function that writes an entry as it is now and replaces its folder.

        The function raises OSError, with the old folder unchanged. Returns None if there is no such entry or the folder has it.
        """
        entry, kv = self.prefix.entries.get(key), self.cache.kv
        if entry is None or self._known.get(key, (None, None))[1] is entry:
            return None
        updaters = {layer.number: layer.updater for layer in kv.offloaded}
        parts = [
            layer_part(number, shape.scale, updaters.get(number), {0: index}, rows={0: rows}, queries={0: shape.queries[0]})
            for number, shape, rows, index in self.prefix.content(kv, entry)
        ]
        said = {"left_pad": [0], "token_ids": [entry.ids.tolist()], "tenant": entry.salt, "about": entry.about}
        header = index_kind(kv) | said

        def write() -> None:
            write_folder(self.cache.model, self._path(key), header, parts)
            self._known[key] = self._stamp(key), entry

        return write

    def save(self, name: str, salt: str = "") -> None:
        """Write an entry if the folder lacks it. Logs a folder that cannot be written."""
        if (write := self.collect((salt, name))) is not None:
            try:
                write()
            except OSError as error:
                _log.warning("%s; it will have to be prefilled again after a restart", error)

    def holds(self, key: Key) -> bool:
        """Return whether a folder for a name exists, even a damaged one."""
        return self._path(key).is_dir()

    def delete(self, key: Key) -> None:
        """Delete an entry's folder, if there is one; on any thread. Raises OSError if files remain."""
        delete_folder(self._path(key))
        self._known.pop(key, None)

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
        with uncollected():
            layers = dict(read_layers(path, header, kv, self.cache.model.device))
        held = {number: (shape, states[0]) for number, (shape, states) in layers.items()}
        ids = torch.tensor(header["token_ids"][0])
        try:
            self.prefix.restore(kv, name, ids, held, salt=salt, about=about, leaves_room=self._leaves_room)
        finally:
            for _, state in held.values():
                state.release()

    def _path(self, key: Key) -> Path:
        salt, name = key
        return self.folder / (f"{name}@{salt}" if salt else name)

    def _stamp(self, key: Key) -> _Stamp | None:
        """Return an entry's stamp; None if it has no folder.

        If the folder cannot be read, or its parent is another one (for example, nothing is mounted), returns the known
        stamp.
        """
        known = self._known.get(key, (None,))[0]
        try:
            parent = self.folder.stat()
        except OSError:
            return known
        home = parent.st_dev, parent.st_ino
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return None if known is None or known[2] == home else known
        except OSError:
            return known
        return found.st_ino, found.st_mtime_ns, home
