"""Places in the tables of several sequences, as indices, so that one operation writes for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Full(NamedTuple):
    """Where a batch of a sequence begins: at place `begin` of the map and at unit `before`."""

    seq: int
    begin: int
    before: int


@dataclass(frozen=True, slots=True)
class Target:
    """Batches of R sequences as indices of tables [B, H, ..]: sequences [R, 1, 1], heads [H, 1], begin and before [R, 1, 1];
    int64."""

    seqs: Tensor
    heads: Tensor
    begin: Tensor
    before: Tensor

    @classmethod
    def of(cls, full: Sequence[Full], heads: int, device: torch.device) -> Target:
        """On a device; the host does not wait."""
        numbers = torch.tensor(full).to(device, non_blocking=True)
        return cls(
            numbers[:, 0, None, None], torch.arange(heads, device=device)[:, None], *numbers[:, 1:, None, None].unbind(1)
        )

    def units(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first n units of each, of tables of units."""
        return self.seqs, self.heads, self.before + torch.arange(n, device=self.before.device)

    def places(self, n: int, ring: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first n places of each target in the map, and their places in a ring of `ring`, if given."""
        at = self.begin + torch.arange(n, device=self.begin.device)
        return self.seqs, self.heads, at if ring is None else at % ring
