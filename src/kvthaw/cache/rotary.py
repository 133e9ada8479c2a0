"""Rotary embeddings, for an index that needs keys before RoPE."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Rotary:
    """Apply a model's rotary embedding to keys, or invert it.

    The tables cos, sin [T, R] float32 grow by doubling. The first `width` channels rotate: R, or 2 R if the tables hold
    each angle once. A constant offset of positions rotates all keys equally, which changes no ranking.

    angles: the model's own, positions [1, T] -> cos and sin [1, T, R].
    apply: the model's own, (queries, keys [N, n, T, D], cos, sin [N, T, R]) -> both rotated.
    """

    def __init__(self, angles: Angles, apply: Apply) -> None:
        self._angles, self._apply = angles, apply
        self.cos = self.sin = torch.empty(0)
        self.width = 0

    def reserve(self, length: int, device: torch.device) -> None:
        """Make room for positions below length."""
        have = self.cos.shape[0]
        if length <= have and self.cos.device == device:
            return
        cos, sin = self._angles(torch.arange(max(length, 2 * have, 64), device=device)[None])
        self.cos, self.sin = cos[0].float(), sin[0].float()
        if not self.width:
            self.width = self.cos.shape[1]
            try:
                self.turn(torch.zeros(1, 1, self.width, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device))
            except RuntimeError:  # gpt-oss
                self.width *= 2

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Return keys [N, T, D] rotated to positions [N, T], in float32. The tables must cover the positions.

        back: rotate back from them.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        if back:  # the inverse of a rotation that may scale (YaRN)
            norm = cos.square() + sin.square()
            cos, sin = cos / norm, -sin / norm
        some = keys[:, None, :, : self.width].float()
        turned = self._apply(some, some, cos, sin)[1][:, 0]
        return torch.cat((turned, keys[:, :, self.width :].float()), dim=2)

    def __deepcopy__(self, memo: dict[int, object]) -> Rotary:
        return self  # tables only grow, and hold no sequence's data
