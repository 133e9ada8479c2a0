"""Prefill a cache with a prompt, in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.chunks import CHUNK, spans
from kvthaw.engine.hf.fused import fused
from kvthaw.engine.hf.prefill_progress import PrefillProgress, Tell

DENSE_CHUNK = 2048
"""CHUNK if all KV stays on the device."""


def prefill(
    model: PreTrainedModel,
    cache: Cache,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Tell = lambda done, total: None,
) -> Tensor:
    """Prefill a cache of one row with a prompt, chunk by chunk. Returns the logits [V] after its last token.

    Does not wait for offloading and indexing.

    chunk: tokens per chunk. None: CHUNK, or DENSE_CHUNK if all KV stays on the device. Models whose later chunks would lack
        state take the whole prompt at once.
    progress: progress(done, total), in tokens, is called at the start and after every layer of every chunk.
    """
    logits = torch.empty(0)
    for after in chunks(model, cache, ids, chunk=chunk, progress=progress):
        logits = after
    return logits


@torch.no_grad()
def chunks(
    model: PreTrainedModel,
    cache: Cache,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Tell = lambda done, total: None,
) -> Iterator[Tensor]:
    """Prefill a prompt as `prefill` does. Yields the logits [V] after each chunk."""
    total, told = len(ids), PrefillProgress(model, progress)
    told.begin(total)
    size = total if cache.prefills_whole else chunk or (DENSE_CHUNK if cache.settings.method.dense else CHUNK)
    tokens = torch.tensor([list(ids)], device=model.device)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with cache.prompt(total):
        for start, stop in spans(total, max(1, size)):
            with told.part(stop - start), fused(model):
                logits = model(input_ids=tokens[:, start:stop], **{CACHE: cache}, use_cache=True, **keep).logits[0, -1]
            yield logits
