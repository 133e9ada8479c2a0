"""Which token comes next: greedy, or drawn on the device with settings of each row's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.counter_rng import GOLDEN, SPREAD, mix
from kvthaw.errors import ConfigError, at_least


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are drawn.

    temperature: 0 is greedy. top_k: only the so many likeliest tokens, None: all. top_p: only the likeliest tokens that together
    have this share of the probability. seed: the same seed draws the same tokens, whatever rows are in the batch beside it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, temperature=self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


GREEDY = Sampling()


def draw(logits: Tensor, rows: list[Sampling], positions: Tensor) -> Tensor:
    """The next token of each row, [B] int64 on the device of logits [B, V]; positions [B] int64: where it will stand.

    A draw is the largest of the allowed logits / temperature plus Gumbel noise, which a hash of (seed, position, token) gives: no
    state, no host sync. Raises ValueError where rows are not as many as the logits'.
    """
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits and settings for {len(rows)}")
    best = logits.argmax(dim=-1)
    if all(row.temperature == 0 for row in rows):
        return best
    device, vocabulary = logits.device, logits.shape[1]
    settings = [(row.temperature, row.top_k or vocabulary, row.top_p) for row in rows]
    temperature, top_k, top_p = torch.tensor(settings, dtype=torch.float64, device=device)[..., None].unbind(1)
    seeds = torch.tensor([row.seed for row in rows], device=device)
    scaled = logits.double() / temperature.clamp(min=1e-6)
    ranked, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    weights = torch.softmax(ranked, dim=-1)
    allowed = (torch.arange(vocabulary, device=device) < top_k) & (weights.cumsum(dim=-1) - weights < top_p)
    salt = mix(mix(seeds * SPREAD + 1) + positions * GOLDEN)
    bits = (mix(salt[:, None] + tokens * GOLDEN) >> 11) & ((1 << 53) - 1)
    uniform = (bits.double() + 0.5) / (1 << 53)
    noisy = (ranked - torch.log(-torch.log(uniform))).masked_fill(~allowed, -torch.inf)
    drawn = tokens.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]
    return torch.where(temperature[:, 0] == 0, best, drawn)
