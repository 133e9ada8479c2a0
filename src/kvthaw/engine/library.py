"""Prompts that a prefix cache keeps under names, in a folder, for the next process."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.saving import Part, check_header, index_kind, index_tensors, read_layers, write_folder
from kvthaw.errors import CacheError, HostMemoryError

_log = logging.getLogger(__name__)


class Library:
    """A folder with a saved cache for each entry of a prefix cache, which `Cache.load` reads too. Several processes may share it.

    cache: of the model and the settings under which entries are taken up again.
    """

    def __init__(self, cache: Cache, prefix: PrefixCache, folder: Path) -> None:
        self.cache, self.prefix, self.folder = cache, prefix, folder
        self._stamps: dict[str, tuple[int, int] | None] = {}  # of each entry's folder when it was read or saved

    def restore(self) -> dict[str, Any]:
        """Take up all entries of the folder. Returns by name what was saved about each. An entry that is damaged, of another model
        or too large for the memory is left out, with a warning that says so."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else ():
            if not path.name.startswith("."):
                found |= self.refresh(path.name)
        return found

    def changed(self, name: str) -> bool:
        """Return whether another process saved or deleted an entry since it was last read or saved here."""
        return self._stamp(name) != self._stamps.get(name)

    def refresh(self, name: str) -> dict[str, Any]:
        """Take up an entry that is new to this process; forget one that the folder has no more. Returns as restore() does."""
        stamp = self._stamps[name] = self._stamp(name)
        if stamp is None:
            if name in self.prefix.entries:
                self.prefix.forget(name)
            return {}
        path = self.folder / name
        try:
            header = check_header(self.cache.model, path)
            layers = dict(read_layers(path, header, self.cache.kv, self.cache.model.device))
            rows = {number: (own.shape, own.blocks[0]) for number, own in layers.items()}
            kept = {number: own.kept[0] for number, own in layers.items() if own.kept}
            ids = torch.tensor(header["token_ids"][0])
            self.prefix.restore(self.cache.kv, name, ids, rows, salt=header.get("salt", ""), indexes=kept)
        except (CacheError, HostMemoryError) as error:
            _log.warning("%s; it has to be prefilled again", error)
            return {}
        return {name: header.get("about")}

    def parts(self, name: str) -> list[Part]:
        """Return what save() writes of an entry, on the host. Where the device is used, on the thread that uses it."""
        kv, parts = self.cache.kv, []
        updaters = {layer.number: layer.storage.updater for layer in kv.offloaded if layer.plan is not None}
        kept = self.prefix.snapshots(kv, name)
        for number, shape, rows in self.prefix.rows(name):
            index = index_tensors(updaters.get(number), {0: kept.get(number)})
            parts.append(
                (f"layer-{number:04}.safetensors", shape.scale, {"rows.0": rows, "queries.0": shape.queries[0].cpu()} | index)
            )
        return parts

    def save(self, name: str, parts: Sequence[Part], about: Any = None) -> None:
        """Write an entry, in the place of what is there; on any thread. A folder that cannot be written is logged."""
        entry = self.prefix.entry(name)
        header = index_kind(self.cache.kv) | {
            "left_pad": [0],
            "token_ids": [entry.ids.tolist()],
            "salt": entry.salt,
            "about": about,
        }
        try:
            write_folder(self.cache.model, self.folder / name, header, parts)
            self._stamps[name] = self._stamp(name)
        except OSError as error:
            _log.warning("%s; it will have to be prefilled again after a restart", error)

    def delete(self, name: str) -> None:
        """Delete an entry, where there is one."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self._stamps[name] = self._stamp(name)

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Return what is another for every folder that is saved in the place of an entry, None where there is none."""
        try:
            found = (self.folder / name).stat()
        except FileNotFoundError:
            return None
        except OSError:  # shared storage that does not answer has changed nothing
            return self._stamps.get(name)
        return found.st_ino, found.st_mtime_ns
