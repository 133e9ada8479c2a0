"""Join the rows that the query heads of each KV head chose separately into one selection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NONE = torch.iinfo(torch.int32).max


def joined(rows: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Join the rows [B, H, G, m] that the query heads of each KV head chose, -1 padded, into `budget` rows.

    A row that several heads chose occurs once. log_weight hides it from heads that did not choose it. Above `budget` rows,
    the first in text order stay. Static shapes, no host sync. Returns rows, counts and log_weight of a Selection.
    """
    own = torch.where(rows >= 0, rows, _NONE).sort(dim=3).values
    every = own.flatten(2).sort(dim=2).values
    again = torch.zeros_like(every, dtype=torch.bool)
    again[:, :, 1:] = every[:, :, 1:] == every[:, :, :-1]
    every = every.masked_fill(again, _NONE).sort(dim=2).values[:, :, :budget]
    every = F.pad(every, (0, budget - every.shape[2]), value=_NONE)
    wanted = every[:, :, None].expand(-1, -1, own.shape[2], -1).contiguous()
    place = torch.searchsorted(own, wanted).clamp(max=own.shape[3] - 1)
    hidden = (own.gather(3, place) != wanted) & (wanted != _NONE)
    log_weight = torch.zeros(wanted.shape, device=rows.device).masked_fill(hidden, -torch.inf)
    found = every != _NONE
    return torch.where(found, every, -1), found.sum(dim=2, dtype=torch.int32), log_weight.flatten(1, 2)


def joined_or_all(rows: Tensor, budget: int, first: int | Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join rows as joined() does. If the budget holds all tokens of a sequence, every head attends to all.

    first: the first position of all sequences, or [B, 1] int32.
    tokens: [B] int32, the number of positions.
    """
    chosen, counts, log_weight = joined(rows, budget)
    place, fits = torch.arange(budget, dtype=torch.int32, device=rows.device), (tokens <= budget)[:, None]
    every = torch.where(place < tokens[:, None], first + place, -1)[:, None]
    log_weight = log_weight.masked_fill(fits[..., None], 0.0)
    return torch.where(fits[..., None], every, chosen), torch.where(fits, tokens[:, None], counts), log_weight
