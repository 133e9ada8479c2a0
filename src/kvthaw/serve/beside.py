"""A recorded prompt that is read once more under another method, between the steps of other requests.

The worker's thread takes the steps. A step without a result is a chunk of the prompt.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.answering import Answer
from kvthaw.config import CacheConfig
from kvthaw.engine.batch import Batch
from kvthaw.engine.hf import Cache
from kvthaw.engine.prefill import chunks
from kvthaw.errors import CacheError
from kvthaw.evaluate.variant import Variant, check_retrieves
from kvthaw.inspect.page import label, passage_data
from kvthaw.inspect.passages import before_question
from kvthaw.inspect.recorder import Recorder, Recording
from kvthaw.inspect.run import Run, record
from kvthaw.serve.answers import Json
from kvthaw.serve.watcher import MOST_TOKENS, Recall

Step = TypeVar("Step")


def _prefilled(
    batch: Batch, recall: Recall, variant: Variant, chunk: int, step: Step
) -> Generator[Step, None, tuple[Cache, Tensor]]:
    """Yield `step` for the empty cache and for each chunk of the prompt. Returns the cache and the logits [V] after the prompt.

    The batch's prefix cache may have the prompt's KV, or a part of it. Raises ConfigError, before the first step, for settings that
    no cache takes.
    """
    mine, spec, dense, logits, taken = batch.cache.settings, recall.request.spec, variant.resolved.dense, torch.empty(0), 0
    own: Any = {"kv_dtype": None} if dense else {"budget": variant.budget, "retrieved": variant.retrieved}
    config = CacheConfig(block_size=mine.block_size, kv_dtype=mine.kv_dtype)
    cache = Cache(batch.model, variant.resolved, config=replace(config, **own))
    yield step
    if batch.prefix_cache is not None:
        with torch.inference_mode(False), torch.no_grad(), suppress(CacheError):  # which keeps rows of another kv_dtype
            taken = batch.prefix_cache.fill(cache.kv, spec.ids, salt=spec.salt)
    for after in chunks(batch.model, cache, recall.prompt[taken:], chunk=chunk):
        logits = after
        yield step
    cache.wait()
    return cache, logits


def replay(batch: Batch, recall: Recall, variant: Variant, chunk: int) -> Generator[Run]:
    """Send the tokens of an answer through another method. The last step completes the run.

    chunk: tokens of the prompt that a step takes.

    Raises ConfigError, before the first step, for a method that retrieves nothing.
    """
    check_retrieves(variant)
    run, answer = Run(variant), recall.answer
    cache, logits = yield from _prefilled(batch, recall, variant, chunk, run)
    for _ in record(batch.model, cache, (), logits, run, answer, recall.exact, frozenset(), len(answer)):
        yield run


def second_answer(batch: Batch, tokenizer: Any, recall: Recall, variant: Variant, chunk: int) -> Generator[Json]:
    """Answer the prompt again under another method: yield pieces of text, at the end what the answer read and recalled.

    chunk: as for replay().
    """
    cache, logits = yield from _prefilled(batch, recall, variant, chunk, {})
    prompt, spec, recorder, recording = recall.prompt, recall.request.spec, Recorder(cache.kv), Recording()
    sampling = replace(spec.sampling, max_tokens=min(spec.limit, MOST_TOKENS), grammar=None)
    how: Any = {"sampling": sampling, "prompt": prompt, "after": spec.text_after, "stops": spec.stop}
    answer = Answer(batch.model, tokenizer, cache, logits, **how)
    for piece in answer:
        recording.follow(len(answer.tokens), recorder)
        yield {"text": piece} if piece else {}
    found, name = recording.selected, "full attention" if variant.resolved.dense else label(variant)
    told: Json = {"name": name, "finish": answer.finish, "tokens": len(prompt) + len(found)}
    counts = [(rows >= 0).sum(-1).float().mean().item() for step in found for rows in step.values()]
    if counts:
        told["rows"] = sum(counts) / len(counts)
        told["passages"] = passage_data(recording, tokenizer, before_question(prompt), answer.tokens)
    yield told
