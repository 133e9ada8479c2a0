"""Prefill a cache with a prompt, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.chunks import default_chunk, spans
from kvthaw.engine.hf.fused import fused
from kvthaw.engine.hf.prefill_progress import PrefillProgress, Tell

DENSE_CHUNK = 2048
"""Tokens per chunk if all KV stays on the device."""


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

    chunk: tokens per chunk. None: default_chunk, or DENSE_CHUNK if all KV stays on the device. Models whose later chunks would lack
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
    size = total if cache.prefills_whole else chunk or (DENSE_CHUNK if cache.settings.method.dense else default_chunk(model))
    tokens = torch.tensor([list(ids)], device=model.device)
    with cache.prompt(total):
        for _, _, logits in forwards(model, cache, tokens, 0, total, max(1, size), told=told):
            yield logits[0, -1]


def forwards(
    model: PreTrainedModel,
    cache: Cache,
    ids: Tensor,
    start: int,
    stop: int,
    chunk: int,
    *,
    every: bool = False,
    told: PrefillProgress | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Run a model over tokens start .. stop of a prompt. Yields the begin and end of each chunk, and its logits [1, n, V].

    ids: [1, T], the prompt.
    every: give the logits of every token; else of the last one alone, if the model can.
    """
    keep = {"logits_to_keep": 1} if not every and model._supports_logits_to_keep() else {}
    for begin, end in ((start + a, start + b) for a, b in spans(stop - start, chunk)):
        with fused(model), nullcontext() if told is None else told.part(end - begin):
            logits = model(input_ids=ids[:, begin:end], **{CACHE: cache}, use_cache=True, **keep).logits
        yield begin, end, logits
