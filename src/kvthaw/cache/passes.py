"""Loops over the layers of a cache, with few launches for layers of equal shape.

One layer's share of 1,000 tokens keeps an H200 busy for less than 0.1 ms, but its launches, about fifteen, take the host 1
ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, starmap

import torch
from torch import Tensor

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.finite import check_prompts
from kvthaw.cache.host import follow
from kvthaw.cache.host_memory import beyond
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import AttentionParams, LayerKV, LayerShape, PrefillKV
from kvthaw.cache.layer_storage import offload, offload_prompts
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.kernels.freeze import Span
from kvthaw.kernels.gpu import upload
from kvthaw.kernels.interleave import Prompts, interleave

SHORT = 1 << 24
"""Bytes of a layer's keys up to which prompts wait until other layers have attended, if none of them has _ENGINES tokens."""
BUILT_AT_ONCE = 4
"""Layers whose indexes of a joining prompt are built between two steps of other sequences."""
_AT_ONCE = 1 << 28
"""Most bytes of rows that leave rings in one launch, and of prompts that wait; at least one layer."""

_ENGINES = 4096
"""Tokens of a prompt from which copy engines take rows to the host instead of a kernel. They need a copy for each block, and one
for each head of a block in part, but leave the multiprocessors to attention."""
Leaving = tuple[int, int, int]
"""A sequence and the tokens that leave its ring, start .. stop."""


def updaters(layers: Sequence[OffloadedLayer]) -> list[tuple[OffloadedLayer, IndexUpdater]]:
    """Return the layers that have an index of their own, each with its updater."""
    return [(layer, layer.updater) for layer in layers if layer.updater is not None]


# Prompts


def wait(prompts: Sequence[tuple[OffloadedLayer, PrefillKV]]) -> bool:
    """Return whether the prompts of some layers, the latest last, are stored together with the following layers' prompts."""
    layer, new = prompts[-1]
    longest = max((row.stop - row.start for row in new.step.rows()), default=0)
    short = new.keys.nbytes <= SHORT and longest < _ENGINES and len(new.keys) == 1 and not new.passed
    return short and sum(2 * each.keys.nbytes for _, each in prompts) < _AT_ONCE and not layer.on_host


def store(prompts: Sequence[tuple[OffloadedLayer, PrefillKV]]) -> None:
    """Store and index the KV of prefills. Layers with equal shapes and stores share launches."""
    alike: dict[Hashable, list[tuple[OffloadedLayer, PrefillKV]]] = {}
    for layer, new in prompts:
        own = layer.storage
        stored = tuple(own.store.length(row.seq) for row in new.step.rows())
        kind = own.kind, own.store.format, new.keys.shape, stored
        alike.setdefault(kind, []).append((layer, new))
    for group in alike.values():
        rows = list(group[0][1].step.rows())  # none if all of its tokens are padding
        for some in [rows] if len(group[0][1].keys) == 1 else [[row] for row in rows]:
            if some:
                _store(group, some)
        for layer, new in group:
            if layer.updater is not None:
                first, ended = layer.slab.regions.first_indexed, rows if layer.sequences.ends_with(new.step) else ()
                layer.updater.begin({row.seq: first(row.length) for row in ended}, new.passed)


def _store(group: Sequence[tuple[OffloadedLayer, PrefillKV]], rows: Sequence[Row]) -> None:
    """Store and index the KV of sequences in one row of the step's tensors, in several layers. Rings get the rows as stored."""
    layers, own, tokens = [layer for layer, _ in group], rows[0].row, slice(rows[0].start, rows[-1].stop)
    rows = [replace(row, start=row.start - tokens.start, stop=row.stop - tokens.start) for row in rows]  # without padding
    prompts = [Prompts(new.keys[own, :, tokens], new.values[own, :, tokens], layer.slab.tickets[:, 0]) for layer, new in group]
    one, (heads, n, dim) = layers[0], prompts[0].keys.shape
    kv = prompts[0].keys.new_empty((len(group), heads, n, 2, dim))
    interleave(prompts, [(row.seq, row.start, row.stop) for row in rows], kv)
    for layer in layers:
        layer.unchecked = True
    kv = one.store.format.decode(one.store.format.encode(kv))  # the rows as they are stored
    for row in rows:
        for (_, new), each in zip(group, kv, strict=True):
            if row.seq in new.passed:
                new.passed[row.seq][:, row.past :] = each[:, row.places]
    if n < _ENGINES or len(group) * len(rows) > 1:
        offload_prompts([layer.storage for layer in layers], rows, kv, one.sequences.ends if one.attends_to_all else None)
    else:
        one.storage.up_to({rows[0].seq: rows[0].past})
        with one.streams.offloading([one.store], kv):
            start = one.store.length(rows[0].seq) - rows[0].past
            one.store.append(rows[0].seq, kv[0, :, start:], non_blocking=kv.is_cuda)
    for row in rows:
        for (layer, new), each in zip(group, kv, strict=True):
            if layer.updater is not None:
                keys, values = each[:, row.places].unbind(2)
                layer.updater.prompt(row, keys, values, new.queries[row.seq], new.step.remaining)
    _hold(layers, rows, kv)  # last, because indexes read earlier tokens from the rings


def _hold(layers: Sequence[OffloadedLayer], rows: Sequence[Row], kv: Tensor) -> None:
    """Write the KV [L, H, n, 2, D] of some sequences to sinks and rings, in one launch a layer."""
    slab, found = layers[0].slab, list[tuple[int, int, int]]()  # sequence, slot, place in kv
    for row in rows:
        for begin, end in slab.regions.held_of(row.past, row.length):
            slots = chain.from_iterable(starmap(range, slab.runs(begin, end)))
            found += [(row.seq, slot, at) for at, slot in enumerate(slots, row.start + begin - row.past)]
    seqs, slots, places = upload(list(zip(*found, strict=True)), torch.int64, kv.device)
    for layer, own in zip(layers, kv.index_select(2, places), strict=True):
        layer.slab.data.transpose(1, 2)[seqs, slots] = own.transpose(0, 1)


def take_over(layer: OffloadedLayer | DenseLayer, other: LayerKV, step: Step) -> None:
    """Copy the tokens of another layer, which are the step's, into an empty layer, each sequence as its prompt."""
    for row in step.rows():
        query, tokens = other.queries(row.seq)[None], row.stop - row.start
        key, value = other.read(row.seq, 0, tokens).to(query.device)[None].unbind(3)  # blocks may lie on the host
        layer.prepare(step, LayerShape.of(other, row.seq, None))
        new = layer.append(replace(step, tokens=tokens, parts=((row.seq, tokens),)), query, key, value)
        if new is not None and isinstance(layer, OffloadedLayer):
            store([(layer, new)])
    layer.recent_queries.replace(other.recent_queries)


# Steps


def decode(layer: OffloadedLayer, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
    """Decode the tokens of a step one by one.

    query: [B, Hq, T, D].
    key, value: [B, H, T, D].

    Returns [B, Hq, T, D].
    """
    outs = []
    for t in range(step.tokens):
        if t and layer.sequences.full(t):
            flush([layer], layer.sequences.leaving(t))
            layer.before_step()
        layer.sequences.place(step, t, query.device)
        outs.append(layer.decode(step, t, query[:, :, t], (key[:, :, t], value[:, :, t]), attention))
    return torch.stack(outs, dim=2)


def renew(layers: Sequence[OffloadedLayer], sequences: Sequences, streams: Streams) -> None:
    """Check that prompts were finite, and rebuild the indexes of stale sequences up to their rings."""
    check_prompts(layers)
    if not sequences.paused:
        streams.prefetcher.release()
    rings = {seq: sequences.indexed(seq) for seq in range(sequences.count) if seq not in sequences.idle}
    for _, updater in updaters(layers):
        updater.renew(rings)


def flush(layers: Sequence[OffloadedLayer], leaving: Sequence[Leaving]) -> bool:
    """Offload and index the tokens that leave rings, in few kernels. Idempotent. Returns False if sequences are stale."""
    alike: dict[tuple[tuple[Span, ...], Hashable], list[OffloadedLayer]] = {}
    before, spans = list[int](), tuple[Span, ...]()
    for layer in layers if leaving else ():
        layer.storage.finish_moves()
        if layer.updater is not None or layer.store.lengths != before:  # else as in the layer before
            spans = tuple(_lacking(layer, leaving))
            before = list(layer.store.lengths) if layer.updater is None else []
        if spans:
            alike.setdefault((spans, layer.storage.kind), []).append(layer)
    for (spans, _), some in alike.items():
        row = some[0].slab.data[0, :, 0].nbytes
        most = max(1, _AT_ONCE // (1 + row * sum(stop - start for _, start, stop, _ in spans)))
        for at in range(0, len(some), most):
            group = some[at : at + most]
            rows = offload([layer.storage for layer in group], spans)
            for layer, own in zip(group, rows, strict=True):
                if layer.updater is not None:
                    layer.updater.flush(spans, own)
            _work_ahead(group, spans)
            if len(some) > most:
                group[0].streams.deferred.flush()  # which holds the rows
    return not any(updater.is_stale(seq) for _, updater in updaters(layers) for seq, _, _ in leaving)


def _lacking(layer: OffloadedLayer, leaving: Sequence[Leaving]) -> Iterator[Span]:
    """Yield the spans of leaving tokens that the index or the store lacks. Stale sequences are left out."""
    updater = layer.updater
    for seq, start, stop in leaving:
        given, stored = updater is None or updater.indexed(seq) >= stop, layer.storage.stored(seq, stop)
        if not (given and stored == stop) and not (updater is not None and updater.is_stale(seq)):
            yield seq, stop if given else start, stop, stored


def _work_ahead(layers: Sequence[OffloadedLayer], spans: Sequence[Span]) -> None:
    """Pass the tokens that follow `spans` in the rings to indexes that start work ahead of time."""
    indexes = [(i, layer.own.index) for i, layer in enumerate(layers) if layer.own is not None]
    if not indexes:
        return
    alike, regions = dict[int, list[Span]](), layers[0].slab.regions
    for seq, _, stop, _ in spans:
        n = indexes[0][1].upcoming(seq)
        if 0 < n <= regions.window and all(index.upcoming(seq) == n for _, index in indexes[1:]):
            alike.setdefault(n, []).append((seq, stop, stop + n, stop + n))
    for some in alike.values():
        rows, seqs = offload([layer.storage for layer in layers], some), [seq for seq, *_ in some]
        for i, index in indexes:
            keys, _ = layers[i].store.format.rounded(*rows[i].unbind(3))
            index.work_ahead(seqs, keys)


def take_effect(layers: Sequence[OffloadedLayer], leaving: Sequence[Leaving]) -> None:
    """Publish changes that indexes have prepared, so that they can undo the coming appends. If this fails, flush() does it."""
    with suppress(Exception):
        for _, updater in updaters(layers):
            updater.retriever.index.take_effect([seq for seq, _, stop in leaving if updater.indexed(seq) < stop])


# Indexes


def wait_indexed(layers: Sequence[OffloadedLayer]) -> None:
    """Wait until indexes have all tokens, and raise the error of any job that failed. Copies to the host may still run."""
    for _, updater in updaters(layers):
        updater.retriever.wait()


def note_lost(layers: Sequence[OffloadedLayer], lost: set[int]) -> None:
    """Mark sequences as stale whose queued index work was dropped; see DeferredBatch."""
    for _, updater in updaters(layers) if lost else ():
        for seq in lost:
            updater.begin_again(seq)
    lost.clear()


# Memory


def check_memory(layers: Sequence[OffloadedLayer], streams: Streams, blocks: int, size: int, device: torch.device) -> None:
    """Raise HostMemoryError if `blocks` more blocks of `size` bytes in every layer fit neither device nor host."""
    streams.device.resolve(device)
    share, pinned = streams.device.share, device.type == "cuda"

    def need(layer: OffloadedLayer) -> int:
        return layer.store.host_need(blocks) if layer.plan else beyond(blocks, share(layer.number), size, pinned=pinned)

    streams.memory.check(lambda: sum(map(need, layers)))


def reserve(layers: Sequence[OffloadedLayer], sequences: Sequences, tokens: int) -> None:
    """Allocate the blocks for tokens that leave their rings while `tokens` tokens are decoded one by one.

    Raises HostMemoryError before anything has changed.
    """
    if sequences.filling or not sequences.decodes(tokens):
        return
    if tokens == 1 and not sequences.full():
        return
    after = {seq: sequences.length(seq) + tokens for seq in range(sequences.count) if seq not in sequences.idle}
    ends = {seq: end for seq, n in after.items() if (end := sequences.indexed(seq, n)) > sequences.indexed(seq)}
    for layer in layers if ends else ():
        layer.storage.reserve(ends)


def look_ahead(layers: Sequence[OffloadedLayer], sequences: Sequences, since: int) -> None:
    """Pin host memory for blocks that sequences need soon, and move blocks between device and host to make room for them.

    Sequences of one length need their next block in all layers at the same token. Pinning one takes 1.5 ms, so a background
    thread does it. Few layers have their turn to move a block after each step.

    since: number of decoded tokens at the last call.
    """
    store, regions, count = layers[0].store, layers[0].slab.regions, sequences.count
    turns = layers[0].streams.layers * count
    steps = min(turns, max(1, store.block_size // 2, store.block_size - regions.buffer))
    begins = ((seq, sequences.length(seq) - regions.window - 1) for seq in range(count) if seq not in sequences.idle)
    soon = sum(store.reserved(seq) < min(sequences.ends.get(seq, begin + steps), begin + steps) for seq, begin in begins)
    if soon:
        needs = _lacking_blocks(layers, soon)
        _pin(layers, {size: blocks for size, blocks in needs.items() if layers[0].streams.memory.short_of(blocks, size)})
    placed = {layer.number: layer for layer in layers if layer.storage.placement is not None}
    for step in range(max(since, sequences.decoded - steps) + 1, sequences.decoded + 1) if placed else ():
        for turn in range(step % steps, turns, steps):
            if (layer := placed.get(turn // count)) is not None:
                layer.balance(soon)


def expect(layers: Sequence[OffloadedLayer], seq: int, tokens: int) -> None:
    """Pin memory on a background thread for a sequence of `tokens` tokens and its next block in all layers.

    Chunks of its prompt, for which other sequences wait, then find pinned memory. With 0 tokens, nothing more is pinned.
    """
    if layers:
        store = layers[0].store
        blocks = -(-tokens // store.block_size) + 1 - store.reserved(seq) // store.block_size if tokens else 0
        _pin(layers, _lacking_blocks(layers, blocks))


def _lacking_blocks(layers: Sequence[OffloadedLayer], blocks: int) -> Counter[int]:
    """Return how many of `blocks` more pinned blocks of each layer have no room on the device, by their bytes."""
    needs = Counter[int]()
    for store in (layer.store for layer in layers if layer.store.pinned):
        needs[store.block_bytes] += max(0, blocks - store.room)
    return needs


def _pin(layers: Sequence[OffloadedLayer], needs: Mapping[int, int]) -> None:
    """Pin memory on a background thread for these numbers of blocks, by their bytes."""
    streams = layers[0].streams
    for size, count in needs.items():
        if (take := streams.memory.expect(count, size)) is not None:
            streams.run_beside(take)


def lack_blocks(layers: Sequence[OffloadedLayer], idle: Collection[int]) -> bool:
    """Return whether the device lacks addresses of blocks, except the blocks of idle sequences."""
    return any(layer.store.table.lacks(idle) for layer in layers if layer.storage.tabled)


def forget_blocks(layers: Sequence[OffloadedLayer]) -> None:
    """Mark the addresses that the device has as unknown, after writing them failed."""
    for layer in layers:
        layer.store.table.forget_device()


def follow_blocks(layers: Sequence[OffloadedLayer]) -> None:
    """Copy the addresses of all layers' new blocks to the device at once. Each copy waits for KV in transfer."""
    own = [layer.storage for layer in layers if layer.storage.tabled]
    if own:
        follow([each.store.table for each in own], own[0].slab.data.device)
    for each in own:
        each.follow_blocks()
