"""Centroids learned on the prompt, for comparison: what ParisKV replaces by sign patterns (figure 10).

One k-means a KV head and subspace, once, on the keys of the prompt; keys of the answer are assigned to centroids that may no
longer fit them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels.encode import CENTROIDS, SUB
from kvthaw.kernels.srht import Rotation, srht

_SAMPLE = 8192
_ROUNDS = 10
_BLOCK = 4096


def subspaces(keys: Tensor, rotation: Rotation, *, normalise: bool) -> Tensor:
    """keys [H, n, d] -> [H, B, n, 8] float32, rotated, of unit length before if normalise."""
    x = keys.float()
    if normalise:
        x = torch.nn.functional.normalize(x, dim=-1)
    y = srht(x, rotation)
    return y.reshape(*y.shape[:2], -1, SUB).transpose(1, 2).contiguous()


def learn(points: Tensor, seed: int) -> Tensor:
    """256 centroids of points [H, B, n, 8] by k-means on an evenly spread sample: [H, B, 256, 8]. A centroid without points
    stays."""
    n = points.shape[2]
    sample = points[:, :, torch.linspace(0, n - 1, min(n, _SAMPLE), device=points.device).long()]
    count = sample.shape[2]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randperm(count, generator=generator).repeat(-(-CENTROIDS // count))[:CENTROIDS]
    centroids = sample[:, :, start.to(points.device)].clone()
    for _ in range(_ROUNDS):
        ids = assign(sample, centroids).long()
        sums = torch.zeros_like(centroids).scatter_add_(2, ids[..., None].expand_as(sample), sample)
        sizes = sums.new_zeros((*ids.shape[:2], CENTROIDS)).scatter_add_(2, ids, torch.ones_like(sample[..., 0]))
        centroids = torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], centroids)
    return centroids


def assign(points: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each point [H, B, n, 8]: [H, B, n] uint8."""
    half = centroids.square().sum(dim=-1)[:, :, None] / 2
    parts = [
        (points[:, :, at : at + _BLOCK] @ centroids.transpose(2, 3) - half).argmax(dim=-1).to(torch.uint8)
        for at in range(0, points.shape[2], _BLOCK)
    ]
    return torch.cat(parts, dim=2) if parts else points.new_zeros(points.shape[:3], dtype=torch.uint8)
