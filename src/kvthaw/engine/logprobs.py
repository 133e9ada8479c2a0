"""The tokens that a step chose, and the log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import Download

TOPK = 1024
"""The most of a row's largest numbers that torch.topk finds; beyond it the row is sorted."""

_ROWS = 64  # rows of logits whose log-probabilities are computed at once, in float64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of the model's probability of a token, and of the likeliest ones: (token, logprob), likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens chosen in one step, on the device. tokens [B] int64; scores [B, 2 + 2n] of `score`, None where none were asked for."""

    tokens: Tensor
    scores: Tensor | None = None

    def read(self) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Return tokens and log-probabilities in one transfer to the host."""
        return self.fetch()()

    def fetch(self) -> Callable[[], tuple[list[int], list[TokenLogprobs] | None]]:
        """Begin that transfer. Returns what waits for it, but for nothing that the device is given later, and returns both."""
        numbers = Download(self.tokens if self.scores is None else self.scores)
        if self.scores is None:
            return lambda: (numbers().tolist(), None)

        def read() -> tuple[list[int], list[TokenLogprobs]]:
            found = logprobs(numbers())
            return [one.token for one in found], found

        return read


def score(logits: Tensor, tokens: Tensor, n: int = 0) -> Tensor:
    """Return [B, 2 + 2n] float64: tokens [B], their log-probabilities, those of the n likeliest of logits [B, V], their ids.

    n is cut to V. Takes no more float64 memory than some rows of the logits need.
    """
    parts = []
    for x, chosen in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True):
        values, ids = top(x, min(n, x.shape[1]))
        total = x.double().logsumexp(dim=-1, keepdim=True)
        found = x.gather(1, chosen[:, None]).double() - total, values.double() - total, ids.double()
        parts.append(torch.cat([chosen[:, None].double(), *found], dim=1))
    return torch.cat(parts)


def logprobs(scores: Tensor) -> list[TokenLogprobs]:
    """Read what `score` found, in one transfer to the host."""
    found = []
    for token, chosen, *rest in scores.tolist():
        n = len(rest) // 2
        found.append(TokenLogprobs(int(token), chosen, tuple(zip(map(int, rest[n:]), rest[:n], strict=True))))
    return found


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of x [B, V] and their places, [B, k] each. Equal ones stay in order."""
    vocabulary = x.shape[1]
    if k > TOPK or k == vocabulary or x.dtype == torch.float64:
        ranked, tokens = x.sort(dim=-1, descending=True, stable=True)
        return ranked[:, :k], tokens[:, :k]
    x = x.float()
    # Which of several equals topk returns is not said, so it gets none: int64 keys of a value's order and its place behind it.
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)  # -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(vocabulary - 1, -1, -1, device=x.device)
    keys = ((order.long() << 32) | places).topk(k, dim=-1).values
    tokens = vocabulary - 1 - (keys & 0xFFFFFFFF)
    return x.gather(1, tokens), tokens
