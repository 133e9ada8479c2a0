"""Up to how many tokens full attention takes less time than a method."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Crossing:
    """From how many tokens on a method takes less time than full attention.

    tokens: (sequences decoded together, tokens of each) where both take as long, ascending. token_bytes: KV of one token in one
    layer of the model for which that holds; 0: of any. source: where the numbers come from. device: of the model.
    """

    tokens: tuple[tuple[int, int], ...]
    token_bytes: int = 0
    source: str = "full_below"
    device: torch.device = _CPU

    def on(self, token_bytes: int, device: torch.device) -> Crossing:
        """Return the same for another model: full attention takes as long as its KV takes to read."""
        share = self.token_bytes / token_bytes if self.token_bytes else 1.0
        tokens = tuple((seqs, round(each * share)) for seqs, each in self.tokens)
        return replace(self, tokens=tokens, token_bytes=token_bytes, device=device)

    def total(self, seqs: int) -> int:
        """Return the tokens of all of so many sequences: in proportion to their number beyond those known, by a straight line
        between two of them."""
        few = [(n, each) for n, each in self.tokens if n <= seqs]
        many = [(n, each) for n, each in self.tokens if n > seqs]
        if not few or not many:
            return seqs * (few[-1] if few else many[0])[1]
        (a, low), (b, high) = few[-1], many[0]
        return round(a * low + (b * high - a * low) * (seqs - a) / (b - a))
