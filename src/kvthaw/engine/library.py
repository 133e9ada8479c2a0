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
    """A folder with a saved cache for each entry of a prefix cache, which `Cache.load` reads too.

    cache: of the model and the settings under which entries are taken up again.
    """

    def __init__(self, cache: Cache, prefix: PrefixCache, folder: Path) -> None:
        self.cache, self.prefix, self.folder = cache, prefix, folder

    def restore(self) -> dict[str, Any]:
        """Take up all entries of the folder. Returns by name what was saved about each. An entry that is damaged, of another model
        or too large for the memory is left out, with a warning that says so."""
        found = {}
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else ():
            if path.name.startswith("."):
                continue
            try:
                header = check_header(self.cache.model, path)
                layers = dict(read_layers(path, header, self.cache.kv, self.cache.model.device))
                rows = {number: (own.shape, own.blocks[0]) for number, own in layers.items()}
                kept = {number: own.kept[0] for number, own in layers.items() if own.kept}
                ids = torch.tensor(header["token_ids"][0])
                self.prefix.restore(self.cache.kv, path.name, ids, rows, salt=header.get("salt", ""), indexes=kept)
                found[path.name] = header.get("about")
            except (CacheError, HostMemoryError) as error:
                _log.warning("%s; it has to be prefilled anew", error)
        return found

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
        except OSError as error:
            _log.warning("%s; it will have to be prefilled anew after a restart", error)

    def delete(self, name: str) -> None:
        """Delete an entry, where there is one."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
