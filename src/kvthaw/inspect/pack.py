"""Pack integers and sets of tokens into text that a browser unpacks: byte planes, deflated, in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Packed = dict[str, Any]


def pack(values: Tensor) -> Packed:
    """Pack integers from 0 to 2^24 - 1: all lowest bytes, then the next where any is not 0, and so on."""
    planes = [values.to(torch.int64).flatten()]
    while int(planes[-1].max() if planes[-1].numel() else 0) > 255:
        planes.append(planes[-1] >> 8)
    data = b"".join((plane & 255).to(torch.uint8).numpy().tobytes() for plane in planes)
    return {"n": values.numel(), "planes": len(planes), "data": base64.b64encode(zlib.compress(data, 9)).decode()}


def pack_sets(rows: Tensor, tokens: int, base: Tensor | None = None) -> Packed:
    """Pack sets of positions as differences from the previous step's set of the same layer and head, or from `base`.

    The order of sets is layer, head, step. A set is stored as the number of differing positions and the gaps between them.

    rows: [T, L, H, M] positions below `tokens`, padded with -1.
    base: sets of the same shape to take the differences from.
    """
    counts, gaps = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for layer in range(rows.shape[1]):
        own = _keys(rows[:, layer], tokens)
        steps, heads = rows.shape[0], rows.shape[2]
        other = own[own // tokens % steps < steps - 1] + tokens if base is None else _keys(base[:, layer], tokens)
        keys, times = torch.cat((own, other)).unique(return_counts=True)
        keys = keys[times == 1]
        sets, at = keys // tokens, keys % tokens
        counts.append(torch.bincount(sets, minlength=heads * steps))
        gaps.append(torch.where(sets.diff(prepend=sets.new_full((1,), -1)) > 0, at, at.diff(prepend=at.new_zeros(1))))
    return {"counts": pack(torch.cat(counts)), "gaps": pack(torch.cat(gaps))}


def _keys(rows: Tensor, tokens: int) -> Tensor:
    """Return (head * T + step) * tokens + position of all positions of [T, H, M], sorted, each once."""
    steps, heads, _ = rows.shape
    series = torch.arange(heads)[None, :, None] * steps + torch.arange(steps)[:, None, None]
    keys: Tensor = (series * tokens + rows)[rows >= 0].unique()
    return keys


def stacked(steps: Sequence[dict[int, Tensor]], fill: float) -> tuple[list[int], Tensor]:
    """Return the index layers and their selections [T, L, H, ...] at each step, padded with `fill`."""
    layers = sorted({number for step in steps for number in step})
    sizes = [tensor.shape for step in steps for tensor in step.values()]
    largest = [max(size) for size in zip(*sizes, strict=True)] if sizes else [0, 0]
    dtype = next((tensor.dtype for step in steps for tensor in step.values()), torch.int32)
    whole = torch.full((len(steps), len(layers), *largest), fill, dtype=dtype)
    for t, step in enumerate(steps):
        for number, tensor in step.items():
            whole[t, layers.index(number)][tuple(slice(n) for n in tensor.shape)] = tensor
    return layers, whole
