"""The end of a prompt, and what may follow it, sent through a method token by token: likelihoods under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.decode import forward, prefill
from kvthaw.evaluate.variant import Variant, fork

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def divide(prompt: Sequence[int], tail: int) -> tuple[list[int], list[int]]:
    """A prompt's tokens before its last `tail`, at least one of them, and those last ones. Raises ConfigError for an empty prompt
    or a negative tail."""
    if not prompt:
        raise ConfigError("the prompt is empty")
    at_least(0, tail=tail)
    cut = max(1, len(prompt) - tail)
    return list(prompt[:cut]), list(prompt[cut:])


class Prompt:
    """A prompt of which all but the last tokens are in a full cache, from which any number of continuations are told."""

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], tail: int, seed: int = 0) -> None:
        self.model = model
        first, self.tail = divide(prompt, tail)
        self._base = Cache(model, "full", seed=seed)
        self._logits = prefill(model, self._base, first)

    @torch.no_grad()
    def cache(self, variant: Variant) -> tuple[Cache, Tensor]:
        """A cache of the whole prompt under a variant, which has seen the tail token by token; the logits [V] behind it."""
        cache, logits = fork(self._base, variant), self._logits
        for token in self.tail:
            logits = forward(self.model, cache, [token])
        return cache, logits

    @torch.no_grad()
    def loglikelihood(self, variant: Variant, continuation: Sequence[int]) -> tuple[float, bool]:
        """The natural logarithm of a continuation's probability, its tokens sent through the variant one by one, and whether each
        is the likeliest. The first token's comes from the prompt's last: under the budget if that is one of the tail. Raises
        ConfigError for an empty continuation."""
        if not continuation:
            raise ConfigError("the continuation is empty")
        cache, logits = self.cache(variant)
        total, greedy = 0.0, True
        for place, token in enumerate(continuation):
            if place:
                logits = forward(self.model, cache, [continuation[place - 1]])
            scores = torch.log_softmax(logits.float(), dim=-1)
            total += float(scores[token])
            greedy &= int(scores.argmax()) == token
        return total, greedy
