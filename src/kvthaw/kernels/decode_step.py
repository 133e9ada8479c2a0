"""The arguments of one decode step of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from kvthaw.kernels.merge import Partial


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
