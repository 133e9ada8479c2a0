"""Save the tokens of a cache in a folder, and take them up again: in another process, under any method.

A folder has a file of safetensors for each layer and header.json, with the token ids, what the model was, and the SHA-256 of every
file and of the header itself. It is written beside its place, synced, and renamed: whoever reads finds all of it or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvthaw.cache.clone import clone
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.sequences import Sequences
from kvthaw.engine.hf.attention import unwrap
from kvthaw.errors import CacheError
from kvthaw.version import __version__

FORMAT = 1
_HEADER = "header.json"
_SAMPLED = 64  # values of each weight that tell models apart


class SavedLayer:
    """One layer's rows as they were read from a file: what another cache's layer needs to take them over."""

    def __init__(
        self, number: int, sequences: Sequences, scale: float, tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.number, self.sequences, self.scale = number, sequences, scale
        self._rows = [tensors[f"rows.{seq}"] for seq in range(sequences.count)]
        queries = {seq: tensors.get(f"queries.{seq}") for seq in range(sequences.count)}
        self.recent_queries = {seq: found.to(device) for seq, found in queries.items() if found is not None}

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of a sequence."""
        return self._rows[seq][:, start:stop]


def save(model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], path: Path, token_ids: Tensor) -> None:
    """See `Cache.save`. layers: transformers' own of the cache, by number."""
    tokens = torch.as_tensor(token_ids).reshape(-1, torch.as_tensor(token_ids).shape[-1]).cpu()
    held = [kv.sequences.count, kv.sequences.padded_length]
    if list(tokens.shape) != held:
        raise CacheError(f"token_ids has the shape {list(tokens.shape)}; the cache holds {held}")
    if kv.settings.method.evicts:
        raise CacheError(f"{kv.settings.method.name} has dropped tokens, so its cache cannot be saved")
    kv.settle_failure()
    kv.wait()
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        files = {}
        for name, scale, tensors in _tensors(kv, layers):
            safetensors.torch.save_file(tensors, folder / name)
            _sync(folder / name)
            files[name] = {"sha256": _sha256(folder / name), "scale": scale}
        header = {
            "format": FORMAT,
            "kvthaw": __version__,
            "model": identity(model),
            "method": kv.settings.method.name,
            "left_pad": list(kv.sequences.left_pad),
            "token_ids": tokens.tolist(),
            "files": files,
        }
        (folder / _HEADER).write_text(json.dumps(header | {"sha256": _digest(header)}), encoding="utf-8")
        _sync(folder / _HEADER)
        _sync(folder)
        _put(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def load(model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], path: Path) -> None:
    """See `Cache.load`; the cache is empty. layers: transformers' own of the cache, by number."""
    header = read_header(path)
    for name, value in identity(model).items():
        if header["model"].get(name) != value:
            raise CacheError(f"{path} was saved with another model: {name} is {header['model'].get(name)}, not {value}")
    sequences = Sequences()
    sequences.adopt([len(header["token_ids"][0]) - pad for pad in header["left_pad"]])
    found = dict(_read_all(path, header))
    names = {layer.number: _name(layer.number) for layer in kv.layers}
    if missing := sorted({*names.values()} - found.keys()):
        raise CacheError(f"{path} has no {missing[0]}")

    def saved() -> Iterator[LayerKV]:
        for number, name in names.items():
            tensors, scale = found.pop(name), header["files"][name]["scale"]
            yield SavedLayer(number, sequences, scale, tensors, model.device)  # type: ignore[misc]

    clone(kv, sequences, saved())
    for number, layer in enumerate(layers):
        if isinstance(layer, DynamicLayer):
            held = found[_name(number)]
            layer.lazy_initialization(held["keys"].to(model.device), held["values"].to(model.device))
            layer.keys, layer.values = held["keys"].to(model.device), held["values"].to(model.device)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = sequences.padded_length


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a saved cache. Raises CacheError where there is none, or a damaged one, or of another format."""
    try:
        header: dict[str, Any] = json.loads((path / _HEADER).read_text(encoding="utf-8"))
        said = header.pop("sha256")
    except FileNotFoundError:
        raise CacheError(f"{path} is no saved cache") from None
    except (ValueError, AttributeError, KeyError, UnicodeDecodeError):
        raise CacheError(f"{path} is damaged: {_HEADER} is not what was saved") from None
    if said != _digest(header):
        raise CacheError(f"{path} is damaged: {_HEADER} is not what was saved")
    if header["format"] != FORMAT:
        raise CacheError(f"{path} is of format {header['format']}; this version of kvthaw reads {FORMAT}")
    return header


def identity(model: PreTrainedModel) -> dict[str, str]:
    """Return what must be alike for keys and values of one model to be another's: its class, its config, its dtype, its weights (by
    some values of each)."""
    model = unwrap(model)
    config = model.config.get_text_config(decoder=True).to_dict()
    for name in ("_name_or_path", "transformers_version", "_attn_implementation", "dtype", "torch_dtype", "use_cache"):
        config.pop(name, None)
    weights = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().numpy().tobytes()
        weights.update(f"{name} {tuple(weight.shape)}".encode() + some)
    return {
        "architecture": type(model).__name__,
        "config": _digest(config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights.hexdigest(),
    }


def _tensors(kv: KVCache, layers: Sequence[Any]) -> Iterator[tuple[str, float, dict[str, Tensor]]]:
    """Yield the name of each layer's file, its softmax scale and what goes into it."""
    sequences, ours = kv.sequences, {layer.number: layer for layer in kv.layers}
    for number, other in enumerate(layers):
        layer = ours.get(number)
        if layer is not None:
            rows = {f"rows.{seq}": layer.read(seq, 0, sequences.length(seq)) for seq in range(sequences.count)}
            queries = {f"queries.{seq}": found for seq, found in layer.recent_queries.items()}
            yield _name(number), layer.scale, {name: each.cpu().contiguous() for name, each in (rows | queries).items()}
        elif isinstance(other, DynamicLayer):
            held = {"keys": other.keys, "values": other.values}
            yield _name(number), 0.0, {name: each.cpu().contiguous() for name, each in held.items()}


def _read_all(path: Path, header: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Read and check every file, some at a time."""

    def read(name: str) -> dict[str, Tensor]:
        damaged = CacheError(f"{path} is damaged: {name} is not what was saved")
        try:
            if _sha256(path / name) != header["files"][name]["sha256"]:
                raise damaged
            tensors: dict[str, Tensor] = safetensors.torch.load_file(path / name)
        except (OSError, safetensors.SafetensorError):
            raise damaged from None
        return tensors

    names = list(header["files"])
    with ThreadPoolExecutor(4) as readers:
        yield from zip(names, readers.map(read, names), strict=True)


def _name(layer: int) -> str:
    return f"layer-{layer:04}.safetensors"


def _put(folder: Path, path: Path) -> None:
    """Rename a folder to its place. What is there is moved aside first, so that there is the old one, none, or the new one."""
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        if path.exists():
            os.rename(path, old / path.name)
        os.rename(folder, path)
        _sync(path.parent)
    except BaseException:
        if (old / path.name).exists() and not path.exists():
            os.rename(old / path.name, path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
