"""Prefill the prompts of a running batch: in chunks, several in one forward, or by a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.passes import expect
from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.batch_cache import BatchCache, packs
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.fused import fused
from kvthaw.engine.hf.prompt_graphs import prompt_graphs
from kvthaw.engine.logprobs import logprobs, score
from kvthaw.engine.prefill import forwards
from kvthaw.engine.request import Request
from kvthaw.kernels.gpu import sent, upload

_log = logging.getLogger(__name__)
REPLAYS = 8
"""Most captured forwards that are replayed one by one instead of launching one forward. Each reads all weights, 5 ms for 8B on an
H100."""
_SCORED = 4096  # prompt tokens per forward if all their logits are needed


class BatchPrompts:
    """Prefill the prompts of a batch. Each of them is paused until its indexes are built.

    chunk: most tokens of a forward. In models with linear attention the whole prompt is one chunk.
    prefixes: the prefix cache, which gives prompts' beginnings and keeps prompts; None: no prompt is kept.
    leaves_room: as for `PrefixCache.keep`.
    capture: whether forwards of short prompts are captured and replayed.
    indexing: the last logits [1, V] of whole prompts whose indexes are being built.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: BatchCache,
        prefixes: PrefixCache | None,
        leaves_room: Callable[[], bool],
        chunk: int,
        *,
        capture: bool,
    ) -> None:
        self.prefixes, self._leaves_room = prefixes, leaves_room
        self._model, self._cache, self._chunk, self._packs = model, cache, chunk, packs(cache)
        self.graphs = prompt_graphs(model, cache) if capture else None
        self.indexing: dict[Request, Tensor] = {}

    def shares(self, request: Request) -> bool:
        """Return whether a request's prompt may share a forward with others; see together()."""
        return self._packs and request.spec.shares_forward and not request.prefilled

    def replays(self, request: Request) -> bool:
        """Return whether a request's whole prompt can be prefilled by a captured forward."""
        fits = self.graphs is not None and request.prompt <= self._chunk and self.graphs.serves(request.prompt)
        return fits and self.shares(request)

    def replays_all(self, requests: Sequence[Request]) -> bool:
        """Return whether captured forwards prefill these prompts one by one faster than one forward does together."""
        if self.graphs is None or len(requests) > REPLAYS or not all(map(self.replays, requests)):
            return False
        return sum(self.graphs.padded(one.prompt) for one in requests) <= self.graphs.lengths[-1]

    def known(self, request: Request) -> int:
        """Return how many tokens of a prompt without a slot are kept."""
        return 0 if self.prefixes is None else self.prefixes.known(self._cache.kv, _reusable(request), salt=request.spec.salt)

    def continues(self, request: Request) -> bool:
        """Return whether an incomplete prompt that is given up now continues later from where it is."""
        prefixes = None if self._cache.prefills_whole or request in self.indexing else self.prefixes
        return prefixes is not None and prefixes.refused is None

    def _fill(self, request: Request, tokens: int | None) -> bool:
        """Start a prompt with its kept prefix, once the prefix is in memory. Returns whether this is done.

        tokens: how many to read from the file in this call.
        """
        kv, ids, salt = self._cache.kv, _reusable(request), request.spec.salt
        if self.prefixes is None:
            return True
        request.fetched += tokens or request.prompt  # so that this ends even if memory is short
        if request.fetched < request.prompt and self.prefixes.fetch(kv, ids, tokens or 0, salt=salt):
            return False
        request.filled = request.prefilled = self.prefixes.fill(kv, ids, seq=request.seq, salt=salt)
        request.cached_tokens, request.begun = (request.cached_tokens if request.begun else request.filled), True
        return True

    def keep(self, request: Request, tokens: int) -> None:
        """Keep the first `tokens` tokens of a prompt that is known to be finite, and all of one that still needs its name.

        If there is no room for a name, the error is the request's.
        """
        spec, how = request.spec, dict[str, Any]()
        if self.prefixes is None:
            return
        if spec.name is not None and not request.named and request.prefilled == request.prompt:
            request.named, tokens = True, request.prompt
            how = {"name": spec.name, "about": spec.about, "leaves_room": self._leaves_room}
        try:
            self.prefixes.keep(self._cache.kv, spec.ids[:tokens], seq=request.seq, salt=spec.salt, **how)
        except Exception as error:  # no room for a named entry, or no memory
            request.error = error if how else request.error
            _log.info("a prompt is not kept: %s", error)

    def keep_part(self, request: Request) -> None:
        """Keep the prefilled tokens of a prompt that is given up, for the next try."""
        least = 0 if request.prefilled == request.prompt else request.filled
        if self.prefixes is None or request.prefilled <= least:
            return
        try:
            self._cache.kv.finite.end(request.seq)
            self._cache.wait()
        except Exception as error:  # for example, an index that could not be built; no caller waits for the prompt
            _log.info("a prompt that is given up is not kept: %s", error)
        else:
            self.keep(request, request.prefilled)

    def prefill(self, request: Request, tokens: int | None) -> None:
        """Prefill the next tokens of a prompt; see `Batch.prefill`."""
        kv = self._cache.kv
        if request.prefilled == 0:
            if not self._fill(request, tokens):
                return
            kv.sequences.pause(request.seq)
        start = request.prefilled
        stop = request.prompt if self._cache.prefills_whole else min(request.prompt, start + (tokens or self._chunk))
        logits = self._run(request, start, stop)
        request.prefilled = stop
        if start or stop < request.prompt:
            expect(kv.allocated, request.seq, request.prompt if stop < request.prompt else 0)
        kv.finite.prompt([request.seq], kv.offloaded)
        if stop == request.prompt:
            self.indexing[request] = logits

    def together(self, requests: Sequence[Request]) -> list[Request]:
        """Prefill whole prompts in one forward, one after the other in its only row; see `Batch.prefill_together`.

        Returns those without a kept prefix, which are whole now.
        """
        kv, device = self._cache.kv, self._model.device
        for request in requests:
            self._fill(request, None)
            kv.sequences.pause(request.seq)
        whole = [request for request in requests if not request.prefilled]
        if not whole:
            return []
        ids = torch.cat([request.ids for request in whole], dim=1)
        positions = torch.cat([torch.arange(request.prompt, device=device) for request in whole])[None]
        ends = upload([n - 1 for n in accumulate(request.prompt for request in whole)], torch.int64, device)
        how = {"position_ids": positions, "logits_to_keep": ends}
        with kv.sequences.prompts({one.seq: one.prompt for one in whole}), torch.no_grad(), fused(self._model):
            logits = self._model(input_ids=ids, **{CACHE: self._cache}, use_cache=True, **how).logits
        kv.finite.prompt([request.seq for request in whole], kv.offloaded)
        for i, request in enumerate(whole):
            request.prefilled, self.indexing[request] = request.prompt, logits[:, i]
        return whole

    def forget(self, request: Request) -> None:
        """Forget a request that has left the batch."""
        self.indexing.pop(request, None)
        if 0 < request.prefilled < request.prompt:
            expect(self._cache.kv.allocated, request.seq, 0)

    def _run(self, request: Request, start: int, stop: int) -> Tensor:
        """Run the model over tokens start .. stop of a request's prompt. Returns the logits [1, V] after the last."""
        cache, seq = self._cache, request.seq
        if self.graphs is not None and stop == request.prompt and self.replays(request):
            with cache.kv.sequences.prompts({seq: stop}):
                return self.graphs(request.ids)
        n = None if request.tokens else request.spec.sampling.prompt_logprobs
        chunk = request.prompt if cache.prefills_whole else self._chunk if n is None else min(self._chunk, _SCORED)
        logits = torch.empty(0)
        with cache.kv.sequences.prompts({seq: request.prompt - start}), cache.states.filling(seq), torch.no_grad():
            for begin, end, every in forwards(self._model, cache, request.ids, start, stop, chunk, every=n is not None):
                logits = every[:, -1]
                if n is not None:
                    next_ids = sent(request.spec.ids[begin + 1 : end + 1], every.device)
                    request.prompt_logprobs = request.prompt_logprobs[: begin + 1] or [None]
                    request.prompt_logprobs += logprobs(score(every[0, : len(next_ids)], next_ids, n))
        return logits


def _reusable(request: Request) -> Tensor:
    """Return the tokens of a prompt to look up in the prefix cache, which never gives the last RECENT_QUERIES of them."""
    return request.spec.ids[: request.reusable + RECENT_QUERIES] if request.reusable else request.spec.ids[:0]
