"""k-means against the plain definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels import kmeans as op
from kvthaw.kernels.kmeans import Distance
from shapes import DTYPES


def blobs(problems: int, tokens: int, count: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys around well separated centres, so that rounding decides no assignment, and one start a centre."""
    g = torch.Generator().manual_seed(seed)
    centres = 4 * torch.nn.functional.normalize(torch.randn(problems, count, dim, generator=g), dim=2)
    which = torch.randint(count, (problems, tokens), generator=g)
    start = torch.stack([torch.randperm(tokens, generator=g)[:count].sort().values for _ in range(problems)])
    which.scatter_(1, start, torch.arange(count).expand(problems, -1))
    keys = centres.gather(1, which[:, :, None].expand(-1, -1, dim)) + 0.05 * torch.randn(problems, tokens, dim, generator=g)
    return keys, start


SHAPES = [
    (1, 1, 1, 64),
    (2, 63, 4, 64),
    (1, 140, 7, 96),
    (2, 70, 3, 128),
    (1, 40, 40, 256),
    (2, 90, 5, 8),
    (1, 33, 3, 80),
    (1, 40, 4, 192),
]


def plain(keys: Tensor, start: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
    """Means and labels, problem by problem and cluster by cluster."""
    means, labels = [], []
    for keys_n, start_n in zip(keys, start, strict=True):
        centroids, label = keys_n[start_n], None
        for _ in range(20):
            m, b = (x[0] for x in op.probes(centroids[None], distance))
            nearest = (keys_n @ m.T + b).argmax(dim=1)
            if label is not None and torch.equal(nearest, label):
                break
            label = nearest
            own = [keys_n[label == c] for c in range(len(centroids))]
            centroids = torch.stack([some.mean(dim=0) if len(some) else mu for some, mu in zip(own, centroids, strict=True)])
        means.append(centroids)
        labels.append(label)
    return torch.stack(means), torch.stack(labels)


@pytest.mark.parametrize("distance", ["cosine", "l2", "inner"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_definition_is_plain_kmeans(shape: tuple[int, int, int, int], distance: Distance) -> None:
    keys, start = blobs(*shape)
    means, labels = plain(keys, start, distance)
    found, *clusters = op.whole(op.definition_in_pieces(keys, start, distance=distance))
    assert all(torch.equal(a, b) for a, b in zip(clusters, op.grouped(labels, start.shape[1]), strict=True))
    torch.testing.assert_close(found, means, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(
    ("shape", "distance", "dtype"),
    [
        *((s, "cosine", dtype) for s, dtype in zip(SHAPES, itertools.cycle(DTYPES), strict=False)),
        (SHAPES[1], "l2", torch.float32),
        (SHAPES[4], "inner", torch.float16),
    ],
)
def test_kernels_are_the_definition(
    shape: tuple[int, int, int, int], distance: Distance, dtype: torch.dtype, device: torch.device
) -> None:
    keys, start = blobs(*shape)
    keys, start = keys.to(dtype).to(device), start.to(device)
    means, order, stops = op.whole(op.definition_in_pieces(keys, start, distance=distance, iterations=2))
    found, found_order, found_stops = op.whole(op.launch_in_pieces(keys, start, distance=distance, iterations=2))
    assert torch.equal(found_stops, stops)
    assert torch.equal(found_order, order)
    torch.testing.assert_close(found, means, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_kernels_assign_to_a_nearest_centroid(device: torch.device) -> None:
    keys = torch.randn(1, 300, 64, device=device)
    start = torch.arange(0, 300, 30, device=device)[None]
    for distance in ("cosine", "l2", "inner"):
        means, order, stops = op.whole(op.launch_in_pieces(keys, start, distance=distance, iterations=1))
        first = keys[:, start[0]].float()
        m, b = op.probes(first, distance)
        scores = (keys @ m.transpose(1, 2) + b[:, None])[0]
        for c in range(10):
            own = order[0, stops[0, c] : stops[0, c + 1]].long()
            assert (scores[own, c] >= scores[own].amax(dim=1) - 1e-4).all()
            if len(own):
                torch.testing.assert_close(means[0, c], keys[0, own].mean(dim=0), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, torch.float32), (8, torch.float32), (8, torch.bfloat16), (24, torch.float16), (256, torch.float32)]
)
def test_products_are_of_shapes_that_a_gpu_multiplies(
    dim: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter multiplies any: what the kernels were given is looked at instead."""
    given: list[dict[str, int]] = []
    kernel = op._assign

    class Watched:
        def __getitem__(self, grid: object) -> Callable[..., object]:
            def run(*args: object, **shape: int) -> object:
                given.append(shape)
                return kernel[grid](*args, **shape)

            return run

    monkeypatch.setattr(op, "_assign", Watched())
    keys, start = blobs(1, 30, 2, dim)
    op.whole(op.launch_in_pieces(keys.to(device, dtype), start.to(device), distance="l2", iterations=2))
    assert len(given) == 2
    for shape in given:
        assert min(shape["BM"], shape["BN"], shape["DP"]) >= 16
        assert dim <= shape["DP"] <= max(16, 2 * dim)
        assert shape["DP"].bit_count() == 1


def test_stops_early_and_keeps_empty_clusters() -> None:
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    start = torch.tensor([[0, 1, 2]])  # the second centroid equals the first: of equal ones the first takes all
    means, order, stops = op.whole(op.kmeans_in_pieces(keys, start, distance="cosine", iterations=10_000_000))
    assert stops.tolist() == [[0, 3, 3, 4]]
    assert order.tolist() == [[0, 1, 3, 2]]
    assert means[0, 1].tolist() == [1.0, 0.0]


def test_problems_do_not_mix() -> None:
    keys, start = torch.randn(3, 90, 64), torch.stack([torch.randperm(90)[:6] for _ in range(3)])
    together = op.whole(op.kmeans_in_pieces(keys, start, distance="cosine"))
    for n in range(3):
        alone = op.whole(op.kmeans_in_pieces(keys[n : n + 1], start[n : n + 1], distance="cosine"))
        assert all(torch.equal(a[n : n + 1], b) for a, b in zip(together[1:], alone[1:], strict=True))


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, start = blobs(2, 100, 5, 64)
    whole = op.whole(op.definition_in_pieces(keys, start, distance="cosine"))
    monkeypatch.setattr(op, "SCORES", 64)
    parts = op.whole(op.definition_in_pieces(keys, start, distance="cosine"))
    assert torch.equal(whole[1], parts[1])
    assert torch.equal(whole[2], parts[2])
    torch.testing.assert_close(whole[0], parts[0])
