"""Sampled tokens of a step, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels.gpu import Download

TOPK = 1024
"""The largest k for which torch.topk is used; beyond it the row is sorted."""

_ROWS = 64  # rows of logits per computation, in float64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log-probability of a token, and of the likeliest tokens.

    top: (token, logprob) of the likeliest tokens, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens sampled in one step, on the device.

    tokens: [B] int64.
    scores: [B, 2 + 2n] from `score`; None if no log-probabilities are needed.
    """

    tokens: Tensor
    scores: Tensor | None = None

    def fetch(self) -> Callable[[], tuple[list[int], list[TokenLogprobs] | None]]:
        """Start the transfer. Returns a function that waits for it, but not for later work of the device, and returns both."""
        numbers = Download(self.tokens if self.scores is None else self.scores)
        if self.scores is None:
            return lambda: (numbers().tolist(), None)

        def read() -> tuple[list[int], list[TokenLogprobs]]:
            found = logprobs(numbers())
            return [one.token for one in found], found

        return read


def score(logits: Tensor, tokens: Tensor, n: int = 0) -> Tensor:
    """Return [B, 2 + 2n] float64: tokens, their log-probabilities, log-probabilities of the n likeliest tokens, and their ids.

    The float64 memory is bounded by _ROWS rows of logits.

    logits: [B, V].
    tokens: [B].
    n: cut to V.
    """
    parts = []
    for x, chosen in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True):
        values, ids = top(x, min(n, x.shape[1]))
        total = x.double().logsumexp(dim=-1, keepdim=True)
        found = x.gather(1, chosen[:, None]).double() - total, values.double() - total, ids.double()
        parts.append(torch.cat([chosen[:, None].double(), *found], dim=1))
    return torch.cat(parts)


def logprobs(scores: Tensor) -> list[TokenLogprobs]:
    """Convert the result of `score`, in one transfer to the host."""
    found = []
    for token, chosen, *rest in scores.tolist():
        n = len(rest) // 2
        found.append(TokenLogprobs(int(token), chosen, tuple(zip(map(int, rest[n:]), rest[:n], strict=True))))
    return found


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row of x [B, V] and their positions, [B, k] each. Equal values stay in order."""
    vocabulary = x.shape[1]
    if k > TOPK or k == vocabulary or x.dtype == torch.float64:
        ranked, tokens = x.sort(dim=-1, descending=True, stable=True)
        return ranked[:, :k], tokens[:, :k]
    x = x.float()
    # topk does not specify the order of equal values, so its keys are distinct: int64 of a value's rank, then its position.
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)  # -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(vocabulary - 1, -1, -1, device=x.device)
    keys = ((order.long() << 32) | places).topk(k, dim=-1).values
    tokens = vocabulary - 1 - (keys & 0xFFFFFFFF)
    return x.gather(1, tokens), tokens
