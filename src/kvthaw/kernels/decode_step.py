"""One decode step of attention: what is asked, and of which keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvthaw.kernels.places import Newest, held, newest_place, write
from kvthaw.regions import Regions
from kvthaw.types import Partial


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A query of each query head, and the keys and values that its lane sees.

    query [B, Hq, D]; keys, values [B, H, N, D], Hq a multiple of H. A lane sees the places starts[b] <= n < lengths[b] ([B]
    int32; None: 0 and N) that `visible` [B, H, N] bool allows; the others may hold anything, NaN included.
    regions: keys and values are a slab; the first regions.held places are sink and ring, of which a lane sees the positions <
    lengths[b] in the sink and starts[b] .. lengths[b] in the ring, and visible [B, H, N - held] is about the places behind.
    newest: key and value of the last of the lengths[b] tokens, always seen; they are written to its place in keys and values, and
    nothing else is. softcap c: scores become c tanh(score / c). log_weight [B, Hq, N] is added to the logits then. sinks [Hq]:
    logits that take weight and give nothing (gpt-oss). partials: attention over further, disjoint tokens.
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
    softcap: float | None = None
    sinks: Tensor | None = None
    log_weight: Tensor | None = None
    partials: Sequence[Partial] = ()

    def enter(self) -> None:
        """Write the newest tokens to their places."""
        if self.newest is not None:
            assert self.lengths is not None
            write(self.keys, self.values, self.newest, newest_place(self.lengths, self.regions))

    def seen(self) -> Tensor:
        """[B, H, N] bool: the places that a lane sees, once the newest tokens are in theirs."""
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
