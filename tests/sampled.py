"""Tokens of rows that have no state, sampled as a batch of them would."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvthaw.engine.sampling import Sampler, Sampling


def sample(logits: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Return the next token of each row, [B], from logits [B, V] at positions [B]."""
    sampler = Sampler(len(rows), logits.shape[1], logits.device)
    for seq, row in enumerate(rows):
        sampler.join(seq, row)
    return sampler(logits, positions).tokens
