"""The end of a prompt, and what may follow it, sent through a method token by token: likelihoods under a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvthaw.engine.decode import feed
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.variant import Variant, fork, whole


def divide(prompt: Sequence[int], tail: int) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens before its last `tail`, at least one of them, and those last ones. Raises ConfigError for an empty
    prompt or a negative tail."""
    if not prompt:
        raise ConfigError("the prompt is empty")
    at_least(0, tail=tail)
    cut = max(1, len(prompt) - tail)
    return list(prompt[:cut]), list(prompt[cut:])


class Prompt:
    """A prompt whose tokens, except the last `tail`, are in a full cache. Any number of continuations start from it.

    variants: the variants that fork it.
    """

    def __init__(
        self, model: PreTrainedModel, prompt: Sequence[int], tail: int, seed: int = 0, variants: Iterable[Variant] = ()
    ) -> None:
        self.model = model
        first, self.tail = divide(prompt, tail)
        self._base = whole(model, variants, seed)
        self._logits = prefill(model, self._base, first)

    @torch.no_grad()
    def cache(self, variant: Variant) -> tuple[Cache, Tensor]:
        """Return a cache of the whole prompt under a variant, which has seen the tail token by token; the logits [V] behind it."""
        cache = fork(self._base, variant)
        return cache, self._send(cache, self._logits, self.tail)[-1]

    @torch.no_grad()
    def loglikelihood(self, variant: Variant, continuation: Sequence[int]) -> tuple[float, bool]:
        """Return the natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest.

        The tokens go through the variant one by one. The prompt's last token predicts the first of them: under the budget if the
        tail has at least one token. Raises ConfigError for an empty continuation."""
        if not continuation:
            raise ConfigError("the continuation is empty")
        cache, logits = self.cache(variant)
        before = torch.stack(self._send(cache, logits, continuation[:-1]))
        scores, tokens = torch.log_softmax(before.float(), dim=-1), torch.tensor(continuation, device=before.device)
        greedy = bool((scores.argmax(dim=-1) == tokens).all())
        return float(scores.gather(1, tokens[:, None]).sum()), greedy

    def _send(self, cache: Cache, logits: Tensor, tokens: Sequence[int]) -> list[Tensor]:
        """Send tokens through a cache one by one. Returns the logits [V] before each of them and behind the last."""
        return [logits, *(after[0].clone() for after in feed(self.model, cache, tokens))]
