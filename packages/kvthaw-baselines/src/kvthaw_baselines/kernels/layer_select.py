"""Select the same pages for all KV heads of a layer, up to a budget of rows, by their scores for all query heads.

The scores are unit_scores', one launch; merging and choice are unit_select's, which get all query heads as the group of one KV
head. Between the two a few torch operations read the scores once (4 Hq U bytes: 0.5 MB for 4096 pages and 32 heads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import unit_scores, unit_select
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.unit_select import Policy

Gather = Callable[[Tensor], Tensor]


def _as_it_is(scores: Tensor) -> Tensor:
    return scores


def definition(
    query: Tensor, digests: Tensor, stops: Tensor, order: None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy, gather: Gather = _as_it_is, recent: None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select rows as unit_select's definition does, but one choice for the layer, by the policy over all its query heads.

    Arguments and result are as there, with these limits: order is None (text order, so units are the same tokens in every
    head), recent is None, and policy is "max" or "mean".
    gather: completes scores [B, 1, Hq, U] with the query heads that other processes hold. Plain torch over all units; no
        host sync on a GPU.
    """
    scores = unit_scores.definition(query, digests, stops, counts, scale=scale, mean=False).flatten(1, 2)[:, None]
    how: dict[str, Any] = {"first": first, "budget": budget, "policy": policy}
    rows, taken = unit_select.choose(gather(scores), stops[:, :1], None, counts, **how)
    return _of_all_heads(rows, taken, digests.shape[1])


def launch(
    query: Tensor, digests: Tensor, stops: Tensor, order: None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy, gather: Gather = _as_it_is, recent: None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the Triton kernels; arguments and result as in `definition`. Static shapes, no host sync."""
    scores, parts = unit_scores.launch(query, digests, stops, counts, scale=scale, mean=False)
    scores, stops, blocks = gather(scores.flatten(1, 2)[:, None]), stops[:, :1].contiguous(), parts.shape[2]
    known = torch.arange(scores.shape[3], device=query.device) < counts[:, None, None, None]
    sizes = (stops[:, :, 1:] - stops[:, :, :-1])[:, :, None]
    lse = torch.logsumexp((scores + sizes.clamp(min=0).log()).masked_fill(~known, -torch.inf), dim=3)
    whole = torch.stack((lse, torch.ones_like(lse)), dim=2)  # of all units, where the kernel looks for the first block's
    heads, compact = lse.shape[2], 1 << (lse.shape[2] - 1).bit_length()
    parts = F.pad(whole[:, :, None], (0, compact - heads))
    none = parts.new_zeros((*parts.shape[:2], blocks - 1, 2, compact))
    none[:, :, :, 0] = -torch.inf
    parts = torch.cat((parts, none), dim=2)
    found = unit_select.launch_choice(scores, parts, stops, None, counts, first=first, budget=budget, policy=policy)
    return _of_all_heads(*found, digests.shape[1])


def _of_all_heads(rows: Tensor, taken: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return rows.expand(-1, heads, -1).contiguous(), taken.expand(-1, heads).contiguous()


layer_select = by_device(launch, definition)
