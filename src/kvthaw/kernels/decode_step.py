"""The arguments of one decode step of attention: queries, keys and values, and which of these a sequence attends to.

Rows of a slab that are read where they lie are in `in_place`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvthaw.kernels.merge import Partial
from kvthaw.kernels.places import Newest, held, newest_place, write
from kvthaw.regions import Regions


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One query per query head, and keys and values. `Places` says which of these it attends to.

    query: [B, Hq, D]; Hq is a multiple of H.
    keys, values: [B, H, N, D].
    softcap: c; scores become c tanh(score / c).
    sinks: [Hq] attention-sink logits, which take softmax weight and contribute no value (gpt-oss).
    log_weight: [B, Hq, N], added to the logits after the softcap.
    partials: attention over further, disjoint tokens, to be merged.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    _: KW_ONLY
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    log_weight: Tensor | None = None
    partials: Sequence[Partial] = ()


@dataclass(frozen=True, slots=True)
class AnyOrder:
    """Slots in any order.

    visible: [B, H, N] bool, the slots that a sequence attends to; None: all.
    """

    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest tokens, none here, to their slots in keys and values [B, H, N, D]."""

    def seen(self, keys: Tensor) -> Tensor:
        """Return the slots of keys [B, H, N, D] that a sequence attends to, [B, H, N] bool, after `write`."""
        return keys.new_ones(keys.shape[:3], dtype=torch.bool) if self.visible is None else self.visible


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Slots in token order. A sequence attends to slots starts[b] <= n < lengths[b] where `visible` is True.

    lengths, starts: [B] int32; starts None: 0.
    newest: token lengths[b] - 1, always attended. The step writes it to its slot, and writes nothing else.
    visible: [B, H, N] bool; None: True.
    """

    lengths: Tensor
    newest: Newest | None = None
    starts: Tensor | None = None
    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        if self.newest is not None:
            write(keys, values, self.newest, self.lengths.long() - 1)

    def seen(self, keys: Tensor) -> Tensor:
        place = torch.arange(keys.shape[2], device=keys.device)
        seen = AnyOrder(self.visible).seen(keys) & (place < self.lengths[:, None, None])
        if self.starts is not None:
            seen = seen & (place >= self.starts[:, None, None])
        return seen if self.newest is None else seen | (place == self.lengths[:, None, None] - 1)

    def runs(self) -> Iterator[tuple[slice, int, int]]:
        """Yield each run of sequences that attend to the same slots, begin <= n < end, if there are any. `visible` is None."""
        ends = self.lengths.tolist()
        begins = [0] * len(ends) if self.starts is None else self.starts.tolist()
        latest = 0 if self.newest is None else 1
        ranges = [(max(0, min(begin, end - latest)), end) for begin, end in zip(begins, ends, strict=True)]
        seq = 0
        for (begin, end), run in groupby(ranges):
            count = len(list(run))
            if begin < end:
                yield slice(seq, seq + count), begin, end
            seq += count


@dataclass(frozen=True, slots=True)
class InSlab:
    """Slots of a slab, whose first regions.held slots are sink and ring.

    A sequence attends to positions < lengths[b] in the sink and starts[b] .. lengths[b] in the ring.

    lengths, starts: [B] int32.
    newest: as in TokenOrder.
    visible: [B, H, N - held] bool, the slots behind sink and ring that it attends to; None: there are none.
    """

    regions: Regions
    lengths: Tensor
    starts: Tensor
    newest: Newest
    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        write(keys, values, self.newest, newest_place(self.lengths, self.regions))

    def seen(self, keys: Tensor) -> Tensor:
        seen = held(self.lengths, self.starts, self.regions)[:, None].expand(-1, keys.shape[1], -1)
        return seen if self.visible is None else torch.cat((seen, self.visible), dim=2)


Places = AnyOrder | TokenOrder | InSlab
"""Which slots of keys and values a sequence attends to. All other slots may hold anything, NaN included."""
