"""What a token is drawn from, as plain as the definition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvthaw.engine.sampling import Sampling


def distribution(
    logits: Tensor, sampling: Sampling, *, prompt: Sequence[int] = (), output: Sequence[int] = (), stops: Iterable[int] = ()
) -> Tensor:
    """Return the probabilities [V], float64, from which the token after `output` is drawn.

    The definition of `Sampler`, in plain float64; logits that are not float64 are compared as float32. logits [V]: the model's.
    stops: tokens that may not come before min_tokens. Greedy settings give one token probability 1. The token drawn at a position
    is the argmax of log(probabilities) + gumbel(seed, position).
    """
    vocabulary = len(logits)
    x = logits.double().clone()
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    counts = torch.tensor(output, dtype=torch.int64).bincount(minlength=vocabulary).to(x)
    seen = counts > 0
    seen[list(prompt)] = True
    penalty = sampling.repetition_penalty
    x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if len(output) < sampling.min_tokens:
        x[list(stops)] = -torch.inf
    x = x if logits.dtype == torch.float64 else x.float().double()
    if sampling.temperature == 0:
        return torch.zeros_like(x).index_fill(0, x.argmax(), 1.0)
    ranked, tokens = torch.softmax(x / max(sampling.temperature, 1e-6), dim=0).sort(descending=True, stable=True)
    allowed = torch.arange(vocabulary, device=x.device) < (sampling.top_k or vocabulary)
    allowed &= (ranked.cumsum(0) - ranked < sampling.top_p) | (sampling.top_p == 1)
    allowed &= ranked >= sampling.min_p * ranked[0]
    probabilities = torch.zeros_like(x).scatter(0, tokens, ranked * allowed)
    return probabilities / probabilities.sum()
