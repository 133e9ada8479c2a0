"""One choice of pages for a layer, against each query head's softmax and the policy over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines.kernels import layer_select as op

CASES = [
    # sequences' pages, heads, group, budget, policy
    ([1], 1, 1, 5, "max"),
    ([70, 3], 4, 1, 100, "max"),
    ([40, 0, 130], 2, 3, 33, "mean"),
    ([1100], 2, 4, 64, "mean"),
]


@pytest.mark.parametrize(("pages", "heads", "group", "budget", "policy"), CASES)
@pytest.mark.parametrize("path", ["definition", "launch"])
def test_all_heads_get_the_pages_of_the_largest_shares(
    pages: list[int], heads: int, group: int, budget: int, policy: Any, path: str, device: torch.device
) -> None:
    if path == "launch" and not HAS_TRITON:
        pytest.skip("no Triton")
    units, dim = max(pages) + 2, 64
    digests = torch.full((len(pages), heads, units, 2 * dim), float("nan"), device=device)
    stops = torch.full((len(pages), heads, units + 1), -7, dtype=torch.int32, device=device)
    for seq, n in enumerate(pages):
        digests[seq, :, :n] = torch.randn(heads, n, 2 * dim, device=device)
        digests[seq, :, :n, dim:].abs_()
        stops[seq, :, : n + 1] = torch.cat((torch.zeros(1), torch.randint(1, 33, (n,)).cumsum(0))).int()
    counts = torch.tensor(pages, dtype=torch.int32, device=device)
    query = torch.randn(len(pages), heads * group, dim, device=device)
    how: dict[str, Any] = {"first": 4, "budget": budget, "scale": dim**-0.5, "policy": policy}
    rows, taken = getattr(op, path)(query, digests, stops, None, counts, **how)
    for seq, n in enumerate(pages):
        shares = []
        for head in range(heads * group):
            q, own = query[seq, head].double(), digests[seq, head // group, :n].double()
            scores = (own[:, :dim] @ q + own[:, dim:] @ q.abs()) * dim**-0.5
            shares.append((scores - (scores + stops[seq, 0, : n + 1].diff().log()).logsumexp(dim=0)).exp())
        merged = torch.stack(shares).amax(dim=0) if policy == "max" else torch.stack(shares).mean(dim=0)
        best = merged.argsort(descending=True, stable=True).tolist()
        ends = stops[seq, 0].tolist()
        wanted = {4 + i for i in [i for page in best for i in range(ends[page], ends[page + 1])][:budget]}
        for head in range(heads):
            assert set(rows[seq, head].tolist()) - {-1} == wanted
            assert int(taken[seq, head]) == len(wanted)
