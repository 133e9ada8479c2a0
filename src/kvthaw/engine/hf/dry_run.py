"""Compute the memory of a cache without allocating it: model and cache are created on torch's meta device, where tensors have
only sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import available_host_memory, held_bytes
from kvthaw.cache.index_api import Method
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Needs
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.step import Step, roomier
from kvthaw.config import CacheConfig
from kvthaw.engine.hf.model import head_dim, kv_bytes, kv_heads, of_layer, plain_weights, positions
from kvthaw.engine.hf.tensor_parallel import ranks
from kvthaw.methods.auto import Limits, fastest

_log = logging.getLogger(__name__)
_LONGEST = 131072  # tokens to choose a method for, if the model has more positions or does not say
_SAMPLE, _DECODED = 4096, 64
"""Keys of the sample index that estimates the size of an index on the host, and how many of them are appended after its
prompt."""


def dry_run(
    model: PreTrainedModel, kv: KVCache, layers: Sequence[Any], batch: int, prompt: int, new_tokens: int, *, pinned: bool
) -> Needs:
    """Return the memory of an empty `Cache` for `batch` prompts of `prompt` tokens and answers of at most `new_tokens`.

    The cache is unusable afterwards: it counts tokens that it does not have. Tables that have another form on a CPU are counted as
    on a GPU.

    kv, layers: the cache's.
    pinned: whether rows on the host are pinned.
    """
    config, known = model.config.get_text_config(decoder=True), dict[int, tuple[Tensor, Tensor]]()
    made: dict[Hashable, OffloadedLayer] = {}
    twins: dict[int, OffloadedLayer] = {}  # the allocated layer that a layer is like
    dense: list[DenseLayer] = []

    def of(number: int) -> tuple[Tensor, Tensor]:
        if number not in known:
            known[number] = _tensors(model, of_layer(config, number), batch, prompt)
        return known[number]

    def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
        query, key = of(layer.number)
        if isinstance(layer, DenseLayer):
            dense.append(layer)
            layer.append(step, query, key, key)
            return
        twins[layer.number] = twin = made.setdefault((layer.leader is None, query.shape, key.shape), layer)
        if twin is layer:
            layer.allocate(step, query, key, 1.0)

    kv.append_stored_prompt(prompt, [0] * batch, fill)
    sequences, settings, memory = kv.sequences, kv.settings, kv.streams.device
    while sequences.capacity < prompt + new_tokens:
        sequences.capacity = roomier(sequences.capacity, sequences.capacity + 1)
        for one in dense:
            one.before_step()
        for layer in made.values():
            layer.grow()
    memory.fixed = {one.number: one.fixed_bytes() for one in dense}
    fixed = {id(twin): twin.fixed_bytes() for twin in made.values()}
    memory.fixed |= {number: fixed[id(twin)] for number, twin in twins.items()}
    a_key = {id(twin): _bytes_a_key(twin, twin.own) for twin in made.values() if twin.on_host and twin.own is not None}
    blocks = rows = host_index = fetched = 0
    for number, twin in twins.items():
        block = settings.block_size * twin.store.token_bytes
        many = batch * settings.in_blocks(prompt + new_tokens) // settings.block_size if block else 0
        near = min(many, max(0, memory.share(number)) // block) if many and twin.storage.placement is not None else 0
        blocks += near * block
        rows += (many - near) * held_bytes(block, pinned=pinned)
        if many and twin.plan is not None:
            fetched += batch * twin.plan.rows * twin.store.token_bytes * (many - near) // many
        if twin.own is not None and twin.on_host:
            host_index += round(batch * prompt * twin.store.kv_heads * a_key[id(twin)])
            host_index += sum(table.nbytes for table in twin.own.residency.tensors())
    windows = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    for layer in windows:
        _, key = of(layers.index(layer))
        layer.update(key, key)
    slab = sum(twin.slab.data.nbytes for twin in twins.values())
    first, rotary = next(iter(twins.values()), None), {twin.rotary for twin in made.values() if twin.rotary is not None}
    return Needs(
        dense=sum(one.fixed_bytes() for one in dense),
        slab=slab,
        index=sum(memory.fixed[number] for number in twins) - slab + sum(one.cos.nbytes + one.sin.nbytes for one in rotary),
        blocks=blocks,
        rows=rows,
        host_index=host_index,
        searching=sum(twin.own is not None for twin in twins.values()),
        plan=None if first is None else first.plan,
        reason=kv.chooser.reason,
        capacity=sequences.capacity,
        fetched=fetched,
        windows=sum(layer.keys.nbytes + layer.values.nbytes for layer in windows),
    )


def _bytes_a_key(layer: OffloadedLayer, retriever: Retriever) -> float:
    """Return the host bytes per key of one KV head that an index on the host takes, measured on random keys; 0 if it does not
    tell."""
    own = retriever.context
    store, first = HostStore(1, 1, own.head_dim, own.dtype, format=layer.store.format), own.regions.sink
    cpu = torch.device("cpu")
    context = replace(
        own, q_heads=own.group, kv_heads=1, device=cpu, store=store, slab=None, sequences=None, aux=None, deferred=None
    )
    index = layer.settings.method.make_index(context)
    rows = torch.randn(1, first + _SAMPLE, 2, own.head_dim, generator=torch.Generator().manual_seed(0)).to(own.dtype)
    store.append(0, rows)
    queries = rows[:, -1:, 0].expand(own.group, -1, -1)
    prompt, behind = rows[:, first:].split([_SAMPLE - _DECODED, _DECODED], dim=1)
    index.build(0, first, prompt[:, :, 0], prompt[:, :, 1], queries)
    index.append([0], behind[None, :, :, 0], behind[None, :, :, 1], None)
    return float(index.nbytes() / _SAMPLE)


def _tensors(model: PreTrainedModel, config: Any, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the query and key of a layer of a config, of this process's heads, on the meta device."""
    processes = ranks(model)
    query, key = (
        torch.empty(batch, n // processes.all_heads(1), tokens, head_dim(config), dtype=model.dtype, device="meta")
        for n in (config.num_attention_heads, kv_heads(config))
    )
    return query, key


def weight_bytes(model: PreTrainedModel, tokens: int = 0) -> int:
    """Return the bytes of a model's weights.

    tokens: only count what a step of this number of tokens reads, which uses few of the experts; 0: all weights.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), 0)
    used = min(1.0, tokens * (getattr(config, "num_experts_per_tok", None) or 1) / experts) if experts and tokens else 1.0
    return sum(round(weight.nbytes * (used if ".experts." in name else 1.0)) for name, weight in plain_weights(model))


def that_fits(
    model: PreTrainedModel,
    methods: Sequence[Method],
    layers: Sequence[int],
    sized_for: tuple[int, int, int] | None,
    config: CacheConfig,
    needs: Callable[[Method, int, tuple[int, int, int]], Needs],
) -> tuple[Method, str]:
    """Return the fastest of `methods` that fits, and why it is not the first.

    layers: the layers that keep KV of all tokens.
    needs: needs(method, device_memory, size) returns the memory of a cache.
    """
    processes = ranks(model)
    memory = DeviceMemory(config.device_memory or "auto", (), processes)
    memory.resolve(model.device)
    rows, tokens, new = sized_for or (1, min(positions(model) or _LONGEST, _LONGEST), 0)
    every = kv_bytes(model, layers) // processes.all_heads(1)
    if not memory.bytes or rows * (tokens + new) * every <= memory.bytes:  # an index takes less than all KV
        return methods[0], ""
    free = available_host_memory(processes) if config.host_bytes is None else config.host_bytes
    host = None if free is None else processes.least(free)

    def limits(needs: Needs) -> Limits:
        return {"device": (needs.device, memory.bytes)} | ({} if host is None else {"host": (needs.host, host)})

    chosen = fastest(methods, lambda method: needs(method, memory.bytes, (rows, tokens, new)), limits)
    if chosen.lacks and sized_for is not None:
        _log.warning(
            "no method fits %d x %s tokens: %s. A shorter prompt may, kv_dtype='fp8' or quantised weights: kvthaw plan tells",
            rows,
            f"{tokens + new:,}",
            chosen.lacks,
        )
    elif chosen.reason:
        _log.info("%s was chosen: %s", chosen.method.name, chosen.reason)
    return chosen.method, chosen.reason
