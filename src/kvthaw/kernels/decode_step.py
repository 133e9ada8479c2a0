"""The arguments of one decode step of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvthaw.kernels.in_place import Selected
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.places import Newest, held, newest_place, write
from kvthaw.regions import Regions


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One query per query head, and the keys and values that it attends to.

    A sequence attends to slots starts[b] <= n < lengths[b] where `visible` is True. All other slots may hold anything, NaN
    included.

    query: [B, Hq, D]; Hq is a multiple of H.
    keys, values: [B, H, N, D].
    starts, lengths: [B] int32; None: 0 and N.
    visible: [B, H, N] bool. With regions: [B, H, N - held], for the slots behind sink and ring.
    regions: keys and values are slabs whose first regions.held slots are sink and ring. A sequence then attends to
        positions < lengths[b] in the sink and starts[b] .. lengths[b] in the ring.
    selected: M rows that are read where they lie, instead of `visible`. They follow sink and ring: N is held + M.
    newest: key and value of token lengths[b] - 1, always attended. The step writes them to their slot in keys and values,
        and writes nothing else.
    softcap: c; scores become c tanh(score / c).
    log_weight: [B, Hq, N], added to the logits after the softcap.
    sinks: [Hq] attention-sink logits, which take softmax weight and contribute no value (gpt-oss).
    partials: attention over further, disjoint tokens, to be merged.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    _: KW_ONLY
    scale: float
    newest: Newest | None = None
    visible: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    regions: Regions | None = None
    selected: Selected | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    log_weight: Tensor | None = None
    partials: Sequence[Partial] = ()

    def write_newest(self) -> None:
        """Write the newest tokens to their slots."""
        if self.newest is not None:
            assert self.lengths is not None
            write(self.keys, self.values, self.newest, newest_place(self.lengths, self.regions))

    def seen(self) -> Tensor:
        """Return the slots that a sequence attends to, [B, H, N] bool, after `write_newest`."""
        batch, heads, n, _ = self.keys.shape
        if self.regions is not None:
            assert self.lengths is not None
            assert self.starts is not None
            seen = held(self.lengths, self.starts, self.regions)[:, None].expand(-1, heads, -1)
            return seen if self.visible is None else torch.cat((seen, self.visible), dim=2)
        seen = (
            torch.ones((batch, heads, n), dtype=torch.bool, device=self.keys.device) if self.visible is None else self.visible
        )
        if self.lengths is None and self.starts is None:
            return seen
        place = torch.arange(n, device=self.keys.device)
        if self.lengths is not None:
            seen = seen & (place < self.lengths[:, None, None])
        if self.starts is not None:
            seen = seen & (place >= self.starts[:, None, None])
        if self.newest is not None:
            assert self.lengths is not None
            seen = seen | (place == self.lengths[:, None, None] - 1)
        return seen
