"""Take all kinds of steps of a running batch before requests come."""

from __future__ import annotations

import torch

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.window import WindowLayer
from kvthaw.engine.batch import Batch
from kvthaw.engine.scheduler import STEP_TOKENS, chunk_tokens
from kvthaw.kernels.dense import LONG, plan, runs

_TOKENS = 5  # of which the first comes with the prompt, two from eager steps, and one with a capture


def warm(batch: Batch) -> None:
    """Allocate all that a step of a batch without requests needs, capture steps of every number of sequences, and have attention
    plan the lengths of a long prompt's chunks, so that no request waits for that."""
    seqs, on_gpu = 1, batch.cache.model.device.type == "cuda"
    while True:
        for _ in range(seqs):
            batch.prefill(batch.join([0], max_new_tokens=_TOKENS, stop=()))
        while batch.requests:
            batch.step()
        if not on_gpu or seqs == batch.max_seqs:
            break
        seqs = min(2 * seqs, batch.max_seqs)
    if on_gpu:
        _prefill(batch)


def _prefill(batch: Batch) -> None:
    """Prefill two chunks of a long prompt, and plan the attention of later ones."""
    if batch.capacity <= 2 * STEP_TOKENS or batch.cache.settings.method.evicts or batch.cache.foreign:
        return
    request = batch.request(torch.arange(2 * STEP_TOKENS) % batch.vocabulary, max_new_tokens=1, stop=())
    most = batch.admission.most()
    if most is not None and batch.admission.need(request) > most:
        return
    batch.join(request)
    for _ in range(2):
        batch.prefill(request, chunk_tokens(STEP_TOKENS, request.prefilled))
    _plan(batch, request.seq)
    batch.leave(request)  # before its end: a prefix cache keeps whole prompts


def _plan(batch: Batch, seq: int) -> None:
    """Plan attention to earlier KV of every length, see kvthaw.kernels.dense.runs, as it lies in layers of each kind."""
    met: set[tuple[int, int]] = set()
    depth = 0
    while depth < batch.capacity:
        chunk = chunk_tokens(STEP_TOKENS, depth)
        met |= {(chunk, run) for run in runs(depth, LONG)}
        depth += chunk
    kinds = set()
    for layer in batch.cache.kv.layers:
        if isinstance(layer, WindowLayer):
            continue
        (q_heads, _, dim), heads = layer.recent_queries[seq].shape, len(layer.read(seq, 0, 0))
        kind = type(layer), q_heads, heads, dim
        for chunk, run in () if kind in kinds else met:
            query = torch.zeros(1, q_heads, chunk, dim, dtype=batch.model.dtype, device=batch.model.device)
            rows = layer.tensors()[0][:1, :, :run] if isinstance(layer, DenseLayer) else query.new_empty(1, heads, run, 2, dim)
            plan(query, *rows.unbind(3), scale=layer.scale)
        kinds.add(kind)
