"""What a dry run says is what a cache then holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvthaw import Batch, Cache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Needs
from kvthaw.config import CacheConfig
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.errors import CacheError
from kvthaw.index.remainder import RemainderIndex
from kvthaw.kernels.row_format import E4M3
from kvthaw.methods import METHODS
from zoo import build, prompt


def wider(layer: LayerKV) -> int:
    """What tables of a layer take on a CPU beyond their forms on a GPU, which a dry run counts: slots, and means of pages."""
    own = layer.own if isinstance(layer, OffloadedLayer) else None
    if own is None or own.index.traits.on_host or layer.slab.data.is_cuda:
        return 0
    means = own.index.pages.means if isinstance(own.index, RemainderIndex) else None
    small = 0 if means is None else means[..., 0, 0].numel() * E4M3(means.shape[-1], means.dtype).row_bytes
    return own.residency.row_slot.nbytes // 2 + (0 if means is None else means.nbytes - small)


def held(cache: Cache) -> dict[str, int]:
    """The bytes that a cache holds, as Needs names them. On a CPU the tables of an index on the host are on the device too."""
    layers, stats = cache.kv.offloaded, cache.stats()
    fixed = {layer.number: layer.fixed_bytes() - wider(layer) for layer in cache.kv.layers}
    slab = sum(layer.slab.data.nbytes for layer in layers)
    windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    trees = [layer.retriever for layer in layers if layer.on_host and layer.leader is None and layer.retriever is not None]
    angles = {layer.rotary for layer in layers if layer.rotary is not None}  # shared by layers
    turns = sum(one.cos.nbytes + one.sin.nbytes for one in angles)
    tables = [table for tree in trees for table in tree.residency.tensors()]
    here = sum(table.nbytes for table in tables if table.device == layers[0].slab.data.device)
    return {
        "dense": sum(fixed[layer.number] for layer in cache.kv.layers if layer not in layers),
        "windows": sum(layer.keys.nbytes + layer.values.nbytes for layer in windows),
        "slab": slab,
        "index": sum(fixed[layer.number] for layer in layers) - slab - here + turns,
        "blocks": stats.device_block_bytes,
        "rows": stats.kv_host_bytes,
        "host_index": sum(table.nbytes for table in tables) + sum(tree.index.nbytes() for tree in trees),
    }


def agree(model: PreTrainedModel, method: str, length: int = 300, new: int = 3, rows: int = 2, **settings: Any) -> Needs:
    """Check a dry run against a cache that takes prompts and some tokens. Returns what it said."""
    settings = {"budget": 64, "dense_layers": 1, "block_size": 32, **settings}
    unreal = copy.deepcopy(model).to("meta")
    needs = Cache(unreal, method, **settings).needs(rows, length, new, pinned=False)
    cache, ids = Cache(model, method, **settings), prompt(rows, length + new).to(model.device)
    with torch.no_grad():
        model(ids[:, :length], past_key_values=cache)
        for some in ids[:, length:].split(1 if new < 16 else new, dim=1):
            model(some, past_key_values=cache)
    cache.wait()
    found = held(cache)
    trees, told = found.pop("host_index"), {name: getattr(needs, name) for name in found}
    assert needs.host_index == pytest.approx(trees, rel=0.1 if length > 2000 else 1)
    table = 24 * 8 * rows * len(cache.kv.layers)  # addresses of blocks, without which a CPU does
    for name, real in found.items():
        assert told[name] == pytest.approx(real, rel=0, abs=table if name == "index" else 0), (name, told, found)
    return needs


@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_every_method(method: str) -> None:
    agree(build("llama", num_hidden_layers=3), method)


def test_the_needs_of_a_cache_are_asked_once() -> None:
    unreal = build("llama").to("meta")
    cache = Cache(unreal, "quest", budget=64)
    cache.needs(1, 300, 20, pinned=False)
    with pytest.raises(CacheError, match="has 300 tokens"):
        cache.needs(1, 300, 20, pinned=False)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt_oss", "qwen3_moe", "phi3", "llama4", "qwen3_next"])
def test_bytes_of_every_kind_of_layer(name: str) -> None:
    needs = agree(build(name), "clusterkv-plus")
    assert bool(needs.windows) == (name in ("gemma3", "gemma4", "gpt_oss", "llama4"))


@pytest.mark.parametrize(
    "settings",
    [
        {"device_memory": 200_000},
        {"device_memory": "1GiB"},
        {"kv_dtype": "fp8"},
        {"budget": 0.25},
        {"full_below": 10_000},
        {"full_below": 100},
        {"full_below": 10_000, "device_memory": 60_000},
        {"rows": 1, "length": 40},
    ],
    ids=str,
)
def test_bytes_under_settings(settings: dict[str, Any]) -> None:
    agree(build("llama"), "clusterkv-plus", **settings)


def test_admission_counts_the_same_rows() -> None:
    model = build("llama")
    batch = Batch(model, "quest", max_seqs=2, capacity=400, budget=64, dense_layers=1)
    request = batch.join(prompt(1, 300)[0], max_new_tokens=20)
    batch.prefill(request)
    unreal = copy.deepcopy(model).to("meta")
    told = Cache(unreal, "quest", budget=64, dense_layers=1).needs(1, 300, 20, pinned=False)
    assert batch.admission.need(request) == told.rows


def test_bytes_of_an_answer_that_outgrows_the_capacity() -> None:
    agree(build("llama", num_hidden_layers=1), "full", length=200, new=260, rows=1, dense_layers=0)


def test_bytes_of_trees_are_those_of_a_sample() -> None:
    agree(build("llama", max_position_embeddings=4096), "icecache-digest", length=3000, new=12, rows=1, block_size=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "clusterkv-plus", "pariskv-plus", "prkv", "shadowkv", "icecache-digest"])
def test_gpu_bytes(method: str, device: torch.device) -> None:
    agree(build("llama", head_dim=64).to(device, torch.bfloat16), method)


@pytest.mark.parametrize("method", ["pariskv-plus", "clusterkv-plus", "prkv", "oracle", "snapkv"])
def test_what_a_sequence_of_a_batch_takes(method: str) -> None:
    """Wherever rows lie, and whatever full attention takes before."""
    llama, how = build("llama", num_hidden_layers=3), {"budget": 64, "dense_layers": 1, "block_size": 32}
    batch = Batch(llama, method, max_seqs=4, capacity=200, **how)
    batch.prefill(batch.join(prompt(1, 90)[0]))
    held = sum(layer.fixed_bytes() - wider(layer) for layer in batch.cache.kv.layers)
    assert sequence_bytes(llama, method, 200, CacheConfig(full_below=50, **how)) == pytest.approx(held / 4, rel=0.02)
