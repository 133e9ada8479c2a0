"""Warm up a running batch: run all kinds of steps before requests come."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.kv_prefetcher import buffer_for, longest_run
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import buckets
from kvthaw.engine.batch import Batch
from kvthaw.engine.chunk_lengths import STEP_TOKENS, YIELDS, chunk_tokens, streamed_tokens
from kvthaw.engine.graph_runner import bucket
from kvthaw.engine.hf.layer import uses_flash_attention_4
from kvthaw.engine.hf.model import kv_heads, of_layer
from kvthaw.kernels.dense import BLOCK, LONG, causal_attention, continued, plan, runs
from kvthaw.kernels.merge import PARTS

_STEPS = 4  # two eager steps, one capture and one replay


@contextmanager
def frozen() -> Iterator[None]:
    """Context in which garbage collections skip all objects that exist now. A full collection stops every thread for 0.25 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # else extension modules report uncollected objects as leaks at exit


def warm(batch: Batch) -> None:
    """Warm up an empty batch, so that no request waits for allocation, compilation or planning.

    Allocates what steps need. Captures steps for every number of sequences and every bucket of lengths. Compiles kernels
    for prompts in chunks, and plans their attention.
    """
    seqs, on_gpu = 1, batch.cache.model.device.type == "cuda"
    if on_gpu and batch.cache.kv.chooser.full:  # when requests switch to the method, its kernels must be compiled
        _step(batch, 1, by_method=True)
        _serve(batch, 1, by_method=True)
    while True:
        _step(batch, seqs)
        if not on_gpu or seqs == batch.max_seqs:
            break
        seqs = min(2 * seqs, batch.max_seqs)
    if on_gpu:
        _serve(batch, min(2, batch.max_seqs))
    if batch.prompts.graphs is not None:
        batch.prompts.graphs.warm()
    plan_attention(batch)


def _step(batch: Batch, seqs: int, *, by_method: bool = False) -> None:
    """Run steps of `seqs` sequences as if they had the lengths of each bucket in turn.

    by_method: under the method instead of full attention.
    """
    kv, sizes = batch.cache.kv, buckets(batch.capacity)
    requests = [batch.join([0], max_new_tokens=1 + _STEPS * len(sizes), stop=()) for _ in range(seqs)]
    if by_method:
        kv.chooser.change("kernels are compiled", kv.chooser.most())
    if seqs > 1 and all(map(batch.prompts.shares, requests)):
        batch.prefill_together(requests)
    else:
        for request in requests:
            batch.prefill(request)
    try:
        for n, size in enumerate(sizes if batch.model.device.type == "cuda" and bucket(kv, seqs) else sizes[:1], 1):
            kv.sequences.planned = size
            while any(len(request.tokens) <= _STEPS * n for request in batch.requests):
                batch.step()
    finally:
        kv.sequences.planned = 0
        for request in batch.requests:
            batch.leave(request)


def plan_attention(batch: Batch) -> None:
    """Make cuDNN's plans for attention of a long prompt's chunks, for KV as each kind of layer holds it.

    FlashAttention 4 needs no plans; its kernels are compiled instead.

    A plan takes about 50 ms per pair of lengths, and belongs to its thread: call this on the thread that takes the steps.
    Does nothing on a CPU, and for layers without tensors.
    """
    device, config = batch.cache.model.device, batch.model.config.get_text_config(decoder=True)
    if device.type != "cuda":
        return
    known, plans_nothing = set[tuple[object, ...]](), uses_flash_attention_4(batch.cache.model)
    softcap = getattr(config, "attn_logit_softcapping", None)
    for layer in batch.cache.kv.layers:
        held, most, streams = None, BLOCK, False
        if isinstance(layer, OffloadedLayer) and layer.plan is not None:
            store = layer.store
            heads, dim = store.kv_heads, store.head_dim
            if layer.storage.placement is None or store.format.fp8:
                streams = True
            else:
                most = longest_run(heads * store.row_bytes, 1)
                held = buffer_for(store, most, device)[None]
        elif isinstance(layer, DenseLayer) and layer.tensors():
            held, most = layer.tensors()[0][:1], LONG
            heads, dim = held.shape[1], held.shape[4]
        else:
            continue
        own = of_layer(config, layer.number)
        group = own.num_attention_heads // kv_heads(own)
        kind = type(layer), group, heads, dim
        lengths = () if kind in known or plans_nothing else sorted(_lengths(batch.capacity, most, streams=streams))
        for chunk, run in lengths:
            query = torch.zeros(1, chunk, group * heads, dim, dtype=batch.model.dtype, device=device).transpose(1, 2)
            if run:
                rows = query.new_empty(1, heads, run, 2, dim) if held is None else held[:, :, :run]
                plan(query.contiguous(), *rows.unbind(3), causal=False)
            else:  # the chunk's own keys, as the model makes them
                plan(query, query[:, :heads], query[:, :heads], causal=True)
        if kind not in known:  # kernels that merge parts, for each number of parts
            few = torch.zeros(1, 16, group * heads, dim, dtype=batch.model.dtype, device=device).transpose(1, 2)
            own = few[:, :heads], few[:, :heads]
            for parts in range(1, 2 * PARTS):
                continued(few, *own, [own] * parts, scale=1.0, softcap=softcap, flash4=plans_nothing)
            if plans_nothing:
                compile_flash_attention_4(few, heads, softcap)
        known.add(kind)


def compile_flash_attention_4(like: Tensor, heads: int, softcap: float | None) -> None:
    """Compile the kernels of FlashAttention 4 for causal attention. It has one for prompts of one tile of queries, and one for
    longer prompts.

    like: queries [1, Hq, T, D].
    heads: number of KV heads.
    """
    for tokens in (2, 512):
        query = like.new_zeros(1, tokens, like.shape[1], like.shape[3]).transpose(1, 2)
        keys = query[:, :heads]
        causal_attention(query, keys, keys, scale=1.0, softcap=softcap, flash4=True)


def _lengths(capacity: int, most: int, *, streams: bool) -> set[tuple[int, int]]:
    """Return pairs (chunk, run) of a prompt's chunk lengths and the lengths of runs of earlier rows; run 0 is the chunk
    itself.

    most: the longest run.
    streams: the runs come over the bus.
    """
    met = set[tuple[int, int]]()
    for share in (1, YIELDS):
        depth = 0
        while depth < capacity:
            chunk = max(chunk_tokens(STEP_TOKENS, depth) // share, streamed_tokens(depth) if streams else 1)
            # Streamed prompts end with a chunk of any length.
            parts = (*(range(512, chunk, 512) if streams else ()), chunk)
            met |= {(part, run) for part in parts for run in (0, *runs(depth, most))}
            depth += chunk
    return met


def _serve(batch: Batch, seqs: int, *, by_method: bool = False) -> None:
    """Serve `seqs` prompts at once, of each length that layers store in its own way.

    These are: for all layers together, layer by layer, and in chunks with a short last one. Each serves until tokens have
    left their rings, which compiles index updates. No length is a multiple of a block.

    by_method: see _step().
    """
    kv = batch.cache.kv
    for tokens in (1000, STEP_TOKENS // 2 + 173, STEP_TOKENS + chunk_tokens(STEP_TOKENS, STEP_TOKENS) + 11):
        new = 2 + kv.sequences.regions.buffer
        ids = torch.arange(tokens) % batch.vocabulary
        if tokens + new > batch.capacity or (tokens > STEP_TOKENS and batch.cache.prefills_whole):
            return
        requests = [batch.request(ids, max_new_tokens=new, stop=()) for _ in range(seqs)]
        if batch.admission.lacks(*requests):
            return
        kept, batch.prompts.prefixes = batch.prompts.prefixes, None
        try:
            for request in requests:
                batch.join(request)
            if by_method and kv.chooser.full:
                kv.chooser.change("kernels are compiled", kv.chooser.most())
            for request in requests:
                while request.prefilled < tokens:
                    batch.prefill(request, chunk_tokens(STEP_TOKENS, request.prefilled))
            while batch.requests:
                batch.step()
        finally:
            batch.prompts.prefixes = kept
