"""k-means over keys, many problems (heads, batches of tokens) at once."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import ConfigError

Distance = Literal["cosine", "l2", "inner"]
_SCORES = 1 << 22  # float32 similarities held at once by the vectorised path


def check_distance(distance: str) -> None:
    """Raise ConfigError for a distance that does not exist."""
    if distance not in get_args(Distance):
        raise ConfigError(f"distance is {distance!r}; it must be one of {', '.join(get_args(Distance))}")


def probes(centroids: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
    """What a key is compared with: the nearest centroid of k is argmax k.m + b. centroids [N, C, D] float32 -> m like it, b
    [N, C].

    cosine: m = mu / |mu|, 0 where mu is 0. l2: |k - mu|^2 is least where k.mu - |mu|^2 / 2 is largest. inner: k.mu.
    """
    if distance == "cosine":
        norm = centroids.norm(dim=2, keepdim=True)
        return torch.where(norm > 0, centroids / norm, 0.0), torch.zeros_like(norm[..., 0])
    half = -0.5 * centroids.square().sum(dim=2)
    return centroids, half if distance == "l2" else torch.zeros_like(half)


def definition(keys: Tensor, start: Tensor, *, distance: Distance, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Cluster keys [N, T, D] around C centroids that begin as keys[n, start[n]]; start [N, C] int64.

    Assign every key to its nearest centroid (of equal ones the first), make every centroid the mean of its keys, until no
    assignment changes or `iterations` times. An empty cluster keeps its centroid. Returns the means [N, C, D] float32 and the
    labels [N, T] int64 that they are the means of.
    """
    means, labels = [], []
    for keys_n, start_n in zip(keys.float(), start, strict=True):
        centroids, label = keys_n[start_n], torch.full((keys_n.shape[0],), -1, device=keys.device)
        for _ in range(iterations):
            m, b = (x[0] for x in probes(centroids[None], distance))
            nearest = (keys_n @ m.T + b).argmax(dim=1)
            if torch.equal(nearest, label):
                break
            label = nearest
            centroids = torch.stack(
                [keys_n[label == c].mean(dim=0) if (label == c).any() else mu for c, mu in enumerate(centroids)]
            )
        means.append(centroids)
        labels.append(label)
    return torch.stack(means), torch.stack(labels)


def vectorised(keys: Tensor, start: Tensor, *, distance: Distance, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """As `definition`, batched; similarities are made in blocks, never [N, T, C] at once."""
    problems, tokens, dim = keys.shape
    count = start.shape[1]
    centroids = keys.gather(1, start[:, :, None].expand(-1, -1, dim)).float()
    labels = torch.full((problems, tokens), -1, dtype=torch.int64, device=keys.device)
    block = max(1, _SCORES // max(1, problems * count))
    ones = torch.ones((), dtype=torch.float32, device=keys.device).expand(problems, tokens)
    for _ in range(iterations):
        m, b = probes(centroids, distance)
        nearest = torch.empty_like(labels)
        for at in range(0, tokens, block):
            nearest[:, at : at + block] = torch.baddbmm(b[:, None], keys[:, at : at + block].float(), m.transpose(1, 2)).argmax(
                dim=2
            )
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sums = torch.zeros_like(centroids)
        for at in range(0, tokens, block):
            part = labels[:, at : at + block, None].expand(-1, -1, dim)
            sums.scatter_add_(1, part, keys[:, at : at + block].float())
        sizes = torch.zeros((problems, count), device=keys.device).scatter_add_(1, labels, ones)[..., None]
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    return centroids, labels


def grouped(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens sorted by label, [N, T] int32, earlier ones first, and where each of `count` clusters begins and ends in it,
    [N, count + 1] int32. labels [N, T] int64."""
    order = torch.sort(labels, dim=1, stable=True).indices
    sizes = torch.zeros((labels.shape[0], count + 1), dtype=torch.int64, device=labels.device)
    sizes.scatter_add_(1, labels + 1, torch.ones_like(labels))
    return order.int(), sizes.cumsum(dim=1).int()


def kmeans(keys: Tensor, start: Tensor, *, distance: Distance, iterations: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """k-means as in `definition`; returns the means [N, C, D] float32 and the clusters as `grouped` gives them."""
    means, labels = vectorised(keys, start, distance=distance, iterations=iterations)
    return means, *grouped(labels, start.shape[1])
