"""ParisKV's ablations: votes, rotation, candidates, centroids learned on the prompt, and heads that choose alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_codes import SINK, fill, make, sets
from torch import Tensor

from kvthaw.index.codes import CodesIndex
from kvthaw.index.ratios import Ratios
from lab.ablated_codes import LearnedCodesIndex, PlainCodesIndex


def recall(index: CodesIndex, keys: Tensor, queries: Tensor, k: int = 100) -> float:
    """Mean recall_at_k over single queries [n, Hq, D] of an index of one sequence."""
    hits = 0
    for query in queries:
        exact = (
            torch.einsum("hgd,hnd->hgn", query.reshape(keys.shape[0], -1, keys.shape[2]), keys).amax(dim=1).topk(k).indices
            + SINK
        )
        hits += sum(len(a & set(b)) for a, b in zip(sets(index.select(query[None], k)), exact.tolist(), strict=True))
    return hits / (len(queries) * keys.shape[0] * k)


def clustered(n: int, dim: int, shift: float = 0.0) -> Tensor:
    """Keys as models have them: anisotropic, in clusters, away from the origin."""
    centres = torch.randn(2, 64, dim) * torch.linspace(0.2, 2, dim)
    which = torch.randint(64, (2, n))
    return centres.gather(1, which[..., None].expand(-1, -1, dim)) + 0.7 * torch.randn(2, n, dim) + shift


def test_options_change_recall_as_the_paper_says() -> None:
    keys = clustered(6000, 64)
    queries = keys[:, torch.randint(6000, (12,))].transpose(0, 1).contiguous() + 0.5 * torch.randn(12, 2, 64)

    def measure(**options: Any) -> float:
        index = make(group=1, **options)
        fill(index, 0, keys)
        return recall(index, keys, queries)

    ours = measure(ratios=Ratios(rho=0.2, beta=0.1))
    assert ours > measure(ratios=Ratios(rho=0.2, beta=0.1, tiered=False)) - 0.02
    assert ours > measure(kind=PlainCodesIndex, ratios=Ratios(rho=0.2, beta=0.1)) - 0.02
    assert measure(ratios=Ratios(rho=0.5, beta=0.5)) >= ours
    assert measure(ratios=Ratios(rho=0.2, candidates=600)) == ours


@pytest.mark.parametrize(("normalise", "rotate"), [(False, True), (True, False)])
def test_learned_centroids_serve_and_drift(normalise: bool, rotate: bool) -> None:
    """Centroids of the prompt go stale when keys move; sign patterns do not."""
    old, new = clustered(1500, 64), clustered(1500, 64, shift=2.0)
    how: dict[str, Any] = {"kind": LearnedCodesIndex, "group": 1, "normalise": normalise, "rotate": rotate}
    index = make(**how)
    fill(index, 0, old)
    learned = index.tables["learned"].clone()
    index.append([0], new[None], new[None], None)
    assert torch.equal(index.tables["learned"], learned)
    ids = index.tables["ids"][0, :, :, : index.counts[0]].long()
    counted = torch.zeros(*ids.shape[:2], 256, dtype=torch.int32).scatter_add_(2, ids, torch.ones_like(ids, dtype=torch.int32))
    assert torch.equal(index.tables["sizes"][0], counted)
    keys = torch.cat((old, new), dim=1)
    queries = new[:, :6].transpose(0, 1).contiguous()
    assert recall(index, keys, queries) > 0.2
    copy = make(**how)
    copy.clone_from(index)
    assert torch.equal(copy.select(queries[:1], 50).rows, index.select(queries[:1], 50).rows)
