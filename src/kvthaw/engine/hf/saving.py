"""Save the tokens of a cache in a folder, and load them again: in another process, under any method.

A folder has a safetensors file for each layer with its rows, and the index if it is slow to build. header.json has the
token ids, the model's identity, the index's kind, and a checksum of every file and of the header itself. The folder is
written next to its final path, synced, and renamed, so readers find all of it or none. Only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.device_memory import uncollected
from kvthaw.cache.host_memory import Block
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import IndexState, LayerShape, LayerState
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step
from kvthaw.engine.hf import tensor_file
from kvthaw.engine.hf.attention import unwrap
from kvthaw.engine.hf.folders import OWN, put, sync, working_folder
from kvthaw.engine.hf.identity import WEIGHTS, embedded, identity
from kvthaw.engine.hf.tensor_parallel import ranks
from kvthaw.errors import CacheError, HostMemoryError
from kvthaw.kernels.row_format import row_format
from kvthaw.methods.options import digest
from kvthaw.version import __version__

Part = tuple[str, float, dict[str, Tensor]]
"""The name of a layer's file, its softmax scale, and the tensors of the file."""
SavedLayer = tuple[LayerShape, Mapping[int, LayerState]]
"""The shape of a layer, and its state by sequence. An index is of the cache's kind."""
Item = TypeVar("Item")
Done = TypeVar("Done")
FORMAT = 5
"""Version of the form on disk. read_header() refuses every other one; CONTRIBUTING.md says when to raise it."""
_log = logging.getLogger(__name__)
_HEADER = "header.json"
_AT_ONCE = 8  # files written at a time, or read if there are fewer cores
_PINNED_AT_ONCE = 3  # layers: CUDA registers one's pages, others' are mapped


def save(model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], path: Path, token_ids: Tensor, about: Any = None) -> None:
    """Save a cache; see `Cache.save`.

    layers: transformers' layers of the cache, by number.
    about: any JSON value for the header.
    """
    tokens = torch.as_tensor(token_ids).reshape(-1, torch.as_tensor(token_ids).shape[-1]).cpu()
    held = [kv.sequences.count, kv.sequences.padded_length]
    if list(tokens.shape) != held:
        raise CacheError(f"token_ids has the shape {list(tokens.shape)}; the cache holds {held}")
    kv.rollback_failed_step()
    kv.wait()
    header = {"left_pad": list(kv.sequences.left_pad), "token_ids": tokens.tolist(), "about": about}
    write_folder(model, path, index_kind(kv) | header, _tensors(kv, layers))


def write_folder(model: PreTrainedModel, path: Path, about: Mapping[str, Any], parts: Iterable[Part]) -> None:
    """Write a file for each part and a header, and replace the folder if it exists. Deletes leftovers of killed processes.

    Raises OSError, with the existing folder unchanged.

    about: further fields of the header, such as token_ids.
    """
    known = _known(model)  # refuses a split model before anything is made
    try:
        path.parent.mkdir(OWN, parents=True, exist_ok=True)
        with working_folder(path) as folder:
            new = folder / "new"
            new.mkdir(OWN)
            files = {
                name: {"xxh64": checksum, "scale": scale}
                for (name, scale, _), checksum in _some_at_once(parts, lambda part: tensor_file.write(new / part[0], part[2]))
            }
            seen = embedded(unwrap(model), about["token_ids"])
            header = {"format": FORMAT, "kvthaw": __version__, "model": known, "embedded": seen, **about, "files": files}
            (new / _HEADER).touch(tensor_file.PRIVATE)
            (new / _HEADER).write_text(json.dumps(header | {"sha256": _digest(header)}), encoding="utf-8")
            sync(new / _HEADER)
            sync(new)
            put(new, path, folder / "old")
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: the cache cannot be saved", str(path)) from error


def load(model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], path: Path) -> None:
    """Load an empty cache; see `Cache.load`. The cache is unusable if this raises.

    layers: transformers' layers of the cache, by number.
    """
    header = check_header(model, path)
    left_pad, tokens = header["left_pad"], len(header["token_ids"][0])
    held, rebuilt = read_layers(path, header, kv, model.device), dict[int, bool]()

    def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
        _, (shape, states) = next(held)
        layer.begin(step, shape, states)
        for state in states.values():
            state.release()
        indexed = any(state.index is not None for state in states.values())
        rebuilt[layer.number] = not indexed and isinstance(layer, OffloadedLayer) and layer.updater is not None

    with uncollected():  # a collection would hold all threads that read, for 0.4 s
        kv.append_stored_prompt(tokens, left_pad, fill)
    held.close()
    if any(rebuilt.values()):
        _log.info("%s: the index of %s is rebuilt in %d layers", path, kv.settings.method.name, sum(rebuilt.values()))
    for number, layer in enumerate(layers):
        if isinstance(layer, DynamicLayer):
            found = _file(path, header, number).read({})
            keys, values = found["keys"].to(model.device, copy=True), found["values"].to(model.device, copy=True)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = tokens


def read_layers(path: Path, header: Mapping[str, Any], kv: KVCache, device: torch.device) -> Generator[tuple[int, SavedLayer]]:
    """Yield the layers of a cache, by number, from a folder, in blocks on the host.

    Raises CacheError if one has changed since it was saved.
    """
    pinning = threading.Semaphore(_PINNED_AT_ONCE)

    def read(number: int) -> SavedLayer:
        try:
            return _read_layer(path, header, number, kv, device, pinning)
        except (CacheError, HostMemoryError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CacheError(f"{path} is damaged: {_name(number)} has {error!r}") from error

    threads = max(_AT_ONCE, min(32, os.cpu_count() or 1))
    # dense layers free their blocks when they are loaded
    ahead = threads if any(isinstance(layer, DenseLayer) for layer in kv.layers) else len(kv.layers)
    yield from _some_at_once([layer.number for layer in kv.layers], read, threads, ahead)


def _read_layer(
    path: Path,
    header: Mapping[str, Any],
    number: int,
    kv: KVCache,
    device: torch.device,
    pinning: threading.Semaphore,
) -> SavedLayer:
    """Read a layer into blocks.

    pinning: held while blocks are allocated.
    """
    file, scale = _file(path, header, number), header["files"][_name(number)]["scale"]
    seqs = range(len(header["left_pad"]))
    lengths = [len(ids) - pad for ids, pad in zip(header["token_ids"], header["left_pad"], strict=True)]
    if [file.kinds[f"rows.{seq}"][1][1] for seq in seqs] != lengths:
        raise ValueError(f"rows of other numbers of tokens than {lengths}")
    some = next((kind for name, kind in file.kinds.items() if name.startswith("queries.")), None)
    if some is None:
        raise ValueError("no queries")
    (dtype, (q_heads, _, dim)), (stored, (heads, *_)) = some, file.kinds["rows.0"]
    format = row_format(kv.settings.kv_dtype, dim, dtype)
    none = torch.empty((1, q_heads, 0, dim), dtype=dtype, device=device)
    shape = LayerShape(none, none.new_empty((1, heads, 0, dim)), scale, format)
    size, memory = kv.settings.block_size, kv.streams.memory
    counts = [-(-length // size) for length in lengths]
    with pinning:
        blocks = {seq: [block.share() for block in shape.blocks(counts[seq], size, memory)] for seq in seqs}
    if (stored, file.kinds["rows.0"][1][2:]) == (format.stored, format.tail):  # by heads, as the file has them
        row = shape.format.row_bytes
        lasts = [length - size * max(0, counts[seq] - 1) for seq, length in enumerate(lengths)]
        tensors = file.read({f"rows.{seq}": _by_heads(blocks[seq], heads, size * row, lasts[seq] * row) for seq in seqs})
    else:
        tensors = file.read({})
        for seq in seqs:
            for block, rows in zip(blocks[seq], tensors[f"rows.{seq}"].split(size, dim=1), strict=True):
                block.data[:, : rows.shape[1]].copy_(format.convert(rows))
    queries = {seq: tensors[f"queries.{seq}"].to(device, copy=True) for seq in seqs if f"queries.{seq}" in tensors}
    same = header["index"] == index_kind(kv)["index"] and header["index"]["options"] is not None
    indexes = _indexes(tensors) if same else {}
    states = {seq: LayerState(blocks[seq], lengths[seq], format, None, queries.get(seq), indexes.get(seq)) for seq in seqs}
    return shape, states


def _by_heads(blocks: Sequence[Block], heads: int, head_bytes: int, last_bytes: int) -> Tensor:
    """Return the parts of memory [N, 2], addresses and bytes, of the rows of a sequence, head by head.

    No call of torch and no object a block: threads share Python's lock, and Python looks through all objects now and then.

    head_bytes: bytes of a head in a block.
    last_bytes: bytes of the rows of a head in the last block.
    """
    starts = torch.tensor([block.place[0] for block in blocks], dtype=torch.int64, device="cpu")
    found = torch.stack((starts, torch.full_like(starts, head_bytes)), dim=1).repeat(heads, 1, 1)
    found[:, :, 0] += torch.arange(heads, device="cpu")[:, None] * head_bytes
    found[:, -1:, 1] = last_bytes
    return found.view(-1, 2)


def _file(path: Path, header: Mapping[str, Any], number: int) -> tensor_file.TensorFile:
    name = _name(number)
    if name not in header["files"]:
        raise CacheError(f"{path} has no {name}")
    return tensor_file.TensorFile(path / name, header["files"][name]["xxh64"])


def check_header(model: PreTrainedModel, path: Path) -> dict[str, Any]:
    """Return the header of a model's saved cache. Raises CacheError as read_header() does, and for another model."""
    header = read_header(path)
    saved, now, other = header["model"], _known(model), f"{path} was saved with another model: "
    for name in (*now, *saved):
        if saved.get(name) != now.get(name):
            differs = f"its {name} differ" if name.startswith(WEIGHTS) else f"{name} is {saved.get(name)}, not {now.get(name)}"
            raise CacheError(other + differs)
    model, last = unwrap(model), max(map(max, header["token_ids"]))
    if last >= (tokens := model.config.get_text_config(decoder=True).vocab_size):
        raise CacheError(f"{other}the text has token {last:,}, and its vocabulary ends at {tokens:,}")
    if header["embedded"] != embedded(model, header["token_ids"]):
        raise CacheError(f"{other}it embeds tokens of the text otherwise")
    return header


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a saved cache. Raises CacheError if it is missing, damaged or of another format."""
    try:
        tensor_file.check_regular(path / _HEADER)
        header: dict[str, Any] = json.loads((path / _HEADER).read_text(encoding="utf-8"))
        said = header.pop("sha256")
    except FileNotFoundError:
        raise CacheError(f"{path} is no saved cache") from None
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise CacheError(f"{path} is damaged: {_HEADER} is not what was saved") from None
    if said != _digest(header):
        raise CacheError(f"{path} is damaged: {_HEADER} is not what was saved")
    if header.get("format") != FORMAT:
        raise CacheError(f"{path} is of format {header.get('format')}; this version of kvthaw reads {FORMAT}")
    if not _whole(header):
        raise CacheError(f"{path} is damaged: {_HEADER} lacks a field, or has one of another kind")
    return header


def _whole(header: Mapping[str, Any]) -> bool:
    """Return whether a header has all fields that are read, with the right types."""
    kinds = {"model": dict, "index": dict, "files": dict, "embedded": str, "token_ids": list, "left_pad": list}
    if not all(isinstance(header.get(name), kind) for name, kind in kinds.items()):
        return False
    rows, pads, files = header["token_ids"], header["left_pad"], header["files"].values()
    return (
        all(isinstance(row, list) and len(row) == len(rows[0]) and all(map(_is_token, row)) for row in rows)
        and 0 < len(rows) == len(pads)
        and all(type(pad) is int and 0 <= pad < len(rows[0]) for pad in pads)
        and all(isinstance(file, dict) and type(file.get("scale")) is float and "xxh64" in file for file in files)
    )


def _is_token(each: object) -> bool:
    return type(each) is int and 0 <= each < 1 << 63


def _known(model: PreTrainedModel) -> dict[str, str]:
    """Return what must be equal for two models to have interchangeable keys and values.

    Raises CacheError for a split model, because each of its processes has only a part of the keys and values.
    """
    model = unwrap(model)
    if (size := ranks(model).size) > 1:
        raise CacheError(f"the model is split over {size} processes; its caches can be neither saved nor loaded")
    return identity(model)


def _tensors(kv: KVCache, layers: Sequence[Any]) -> Iterator[Part]:
    """Yield the name of each layer's file, its softmax scale and its tensors."""
    sequences, ours = kv.sequences, {layer.number: layer for layer in kv.layers}
    for number, other in enumerate(layers):
        layer = ours.get(number)
        if layer is not None:
            own = {seq: layer.read(seq, 0, sequences.length(seq)) for seq in range(sequences.count)}
            format = row_format(kv.settings.kv_dtype, own[0].shape[3], own[0].dtype)
            rows = {seq: format.encode(each) for seq, each in own.items()}
            updater = layer.updater if isinstance(layer, OffloadedLayer) else None
            found = {} if updater is None else {seq: updater.snapshot(seq) for seq in range(sequences.count)}
            yield layer_part(number, layer.scale, updater, found, rows=rows, queries=layer.recent_queries)
        elif isinstance(other, DynamicLayer):
            held = {"keys": other.keys, "values": other.values}
            yield _name(number), 0.0, {name: each.cpu().contiguous() for name, each in held.items()}


def index_kind(kv: KVCache) -> dict[str, Any]:
    """Return what a cache's indexes depend on besides keys and positions, for a header."""
    method = kv.settings.method
    try:
        options: str | None = digest(method)
    except TypeError:  # an option without a digest
        options = None
    known = {"method": method.name, "options": options, "seed": kv.settings.seed, "kv_dtype": kv.settings.kv_dtype}
    return {"index": known}


def layer_part(
    number: int,
    scale: float,
    updater: IndexUpdater | None,
    states: Mapping[int, IndexState | None],
    **kinds: Mapping[int, Tensor],
) -> Part:
    """Return the name of a layer's file, its softmax scale and its tensors.

    states: of its index, by sequence.
    kinds: rows [H, T, *tail] as they are stored, and queries [Hq, W, D], by sequence.
    """
    held = {f"{kind}.{seq}": each for kind, own in kinds.items() for seq, each in own.items()}
    for seq, state in states.items():
        if updater is not None and state is not None:
            held[f"index.{seq}.span"] = torch.tensor([state.first, state.end])
            held |= {f"index.{seq}.{name}": tensor for name, tensor in updater.retriever.index.state(state.held).items()}
    return _name(number), scale, {name: each.cpu().contiguous() for name, each in held.items()}


def _indexes(tensors: Mapping[str, Tensor]) -> dict[int, IndexState]:
    """Return the states that layer_part() named."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        seq, _, rest = rest.partition(".")
        if kind == "index":
            found.setdefault(int(seq), {})[rest] = tensor.clone()  # it outlives the file
    return {seq: IndexState(state, *state.pop("span").tolist()) for seq, state in found.items()}


def _some_at_once(
    items: Iterable[Item], work: Callable[[Item], Done], most: int = _AT_ONCE, ahead: int = _AT_ONCE
) -> Generator[tuple[Item, Done]]:
    """Yield each item with its result from a pool of `most` threads, in order. After an error no further item is begun.

    ahead: items that are done before the caller takes their results, or given to threads.
    """
    with ThreadPoolExecutor(most) as threads:
        try:
            pending: deque[tuple[Item, Future[Done]]] = deque()
            for item in items:
                pending.append((item, threads.submit(work, item)))
                if len(pending) > ahead:
                    done, result = pending.popleft()
                    yield done, result.result()
            for done, result in pending:
                yield done, result.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _name(layer: int) -> str:
    return f"layer-{layer:04}.safetensors"


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
