"""Compute the memory of a cache without allocating it: its layers are created on torch's meta device, where tensors have only
sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import held_bytes
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Plan
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sequences import roomier
from kvthaw.cache.step import Step

_SAMPLE, _DECODED = 4096, 64
"""Keys of the sample index that estimates the size of an index on the host, and how many of them are appended after its
prompt."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a cache takes, in bytes, when its sequences have reached their full length.

    dense: on the device, KV of the layers that attend to everything, at their capacity.
    slab: on the device, sink, window, buffer and fetched rows.
    index: on the device.
    blocks: on the device, rows that lie there.
    windows: on the device, KV of sliding-window layers.
    rows: on the host.
    host_index: on the host, an estimate.
    searching: number of layers that select rows.
    plan: the sizes in force; None if every layer attends to everything.
    reason: why full attention or the method is in force.
    capacity: tokens per sequence that the device has room for.
    fetched: bytes that cross the bus in a step if no selected row is on the device already.
    """

    dense: int
    slab: int
    index: int
    blocks: int
    rows: int
    host_index: int
    searching: int
    plan: Plan | None
    reason: str
    capacity: int
    fetched: int
    windows: int = 0

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.dense + self.windows + self.slab + self.index + self.blocks

    @property
    def host(self) -> int:
        """All bytes on the host."""
        return self.rows + self.host_index


def dry_run(
    kv: KVCache, tensors: Callable[[int], tuple[Tensor, Tensor]], batch: int, prompt: int, new_tokens: int, *, pinned: bool
) -> Needs:
    """Return the memory of an empty cache for `batch` sequences with prompts of `prompt` tokens and at most `new_tokens`
    answer tokens.

    The cache is unusable afterwards: it counts tokens that it does not have. Tables that have another form on a CPU are counted as
    on a GPU.

    tensors: returns a layer's query [B, Hq, prompt, D] and key [B, H, prompt, D] by its number, on the meta device.
    pinned: whether rows on the host are pinned.
    """
    made: dict[Hashable, OffloadedLayer] = {}
    twins: dict[int, OffloadedLayer] = {}  # the allocated layer that a layer is like
    dense: list[DenseLayer] = []

    def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
        query, key = tensors(layer.number)
        if isinstance(layer, DenseLayer):
            dense.append(layer)
            layer.append(step, query, key, key)
            return
        twins[layer.number] = twin = made.setdefault((layer.chooses, query.shape, key.shape), layer)
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
        block = settings.block_size * twin.host_bytes_per_token()
        many = batch * settings.in_blocks(prompt + new_tokens) // settings.block_size if block else 0
        near = min(many, max(0, memory.share(number)) // block) if many and twin.storage.placement is not None else 0
        blocks += near * block
        rows += (many - near) * held_bytes(block, pinned=pinned)
        if many and twin.plan is not None:
            fetched += batch * twin.plan.rows * twin.host_bytes_per_token() * (many - near) // many
        if twin.own is not None and twin.on_host:
            host_index += round(batch * prompt * twin.store.kv_heads * a_key[id(twin)])
            host_index += sum(table.nbytes for table in twin.own.residency.tensors())
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
