"""A recorded prompt that is answered once more under another method, between the steps of other requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvthaw.answering import Answer
from kvthaw.cache.prefix import PrefixCache
from kvthaw.config import CacheConfig
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.prefill import chunks
from kvthaw.engine.request import Request
from kvthaw.errors import CacheError
from kvthaw.evaluate.variant import Variant
from kvthaw.inspect.page import label, passage_data
from kvthaw.inspect.passages import RECENT
from kvthaw.inspect.recorder import Recorder, Recording
from kvthaw.serve.answers import Json
from kvthaw.serve.errors import as_api_error
from kvthaw.serve.watcher import MOST_TOKENS
from kvthaw.serve.worker import Worker


class Beside:
    """A second answer to a request's prompt. The worker's thread calls its methods.

    config: the block size and the kv_dtype of the server's cache, which kept blocks have too.
    prefix: keeps prompts; it may have this one's KV, or a part of it.
    chunk: tokens of the prompt that a step takes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        request: Request,
        variant: Variant,
        config: CacheConfig,
        prefix: PrefixCache | None,
        chunk: int,
    ) -> None:
        self._model, self._tokenizer, self._request, self._variant = model, tokenizer, request, variant
        self._chunk, self._prefix, self._recording, self._prompt = chunk, prefix, Recording(), request.spec.ids.tolist()
        dense = variant.resolved.dense
        own: Any = {"kv_dtype": None} if dense else {"budget": variant.budget, "retrieved": variant.retrieved}
        self._cache = Cache(model, variant.resolved, config=replace(config, **own))
        self._name = "full attention" if dense else label(variant.method, variant.budget, variant.retrieved)
        self._pieces = self._answer()
        self._said: Answer | None = None

    def _prefill(self, chunk: int) -> Iterator[Tensor]:
        """Load the part of the prompt that the prefix cache has, and yield the logits after each chunk of the rest."""
        request, taken = self._request, 0
        with torch.inference_mode(False), torch.no_grad(), suppress(CacheError):  # which keeps rows of another kv_dtype
            taken = 0 if self._prefix is None else self._prefix.fill(self._cache.kv, request.spec.ids, salt=request.spec.salt)
        yield from chunks(self._model, self._cache, self._prompt[taken:], chunk=chunk)
        self._cache.wait()

    def _answer(self) -> Iterator[str]:
        """Yield nothing for each chunk of the prompt, then the text that each token adds. Record what it recalled."""
        logits = torch.empty(0)
        for after in self._prefill(self._chunk):
            logits = after
            yield ""
        recorder, request = Recorder(self._cache.kv), self._request
        sampling = replace(request.spec.sampling, max_tokens=min(request.spec.limit, MOST_TOKENS), grammar=None)
        how: Any = {"sampling": sampling, "prompt": self._prompt, "after": request.spec.text_after, "stops": request.spec.stop}
        self._said = Answer(self._model, self._tokenizer, self._cache, logits, **how)
        for piece in self._said:
            self._recording.follow(len(self._said.tokens), recorder)
            yield piece

    def step(self) -> str | None:
        """Take a chunk of the prompt, or return the text that the next token adds; None after the last."""
        return next(self._pieces, None)

    def told(self) -> Json:
        """Return what the answer read and recalled."""
        assert self._said is not None
        found = self._recording.selected
        counts = [(rows >= 0).sum(-1).float().mean().item() for step in found for rows in step.values()]
        said: Json = {"name": self._name, "finish": self._said.finish, "tokens": len(self._prompt) + len(found)}
        if counts:
            text = self._prompt[: len(self._prompt) - min(RECENT, len(self._prompt) // 2)]
            said |= {
                "rows": sum(counts) / len(counts),
                "passages": passage_data(self._recording, self._tokenizer, text, self._said.tokens),
            }
        return said

    async def events(self, worker: Worker) -> AsyncIterator[Json]:
        """Yield pieces of the answer, and at the end what it read."""
        try:
            while (piece := await worker.call(self.step)) is not None:
                if piece:
                    yield {"text": piece}
            yield await worker.call(self.told)
        except Exception as error:
            yield as_api_error(error).body()
