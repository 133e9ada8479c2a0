"""Means of pages after appends of any lengths, by kernel and definition, against the means of all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.page_means import RING, Added, Start, definition, launch
from kvthaw.kernels.row_format import E4M3, RowFormat
from shapes import DTYPES, TOLERANCE, poisoned

Extend = Callable[[Sequence[Added], Sequence[Start], int, RowFormat], None]
Case = tuple[Extend, list[int], int]
HEADS, SEQS = 2, 3
STEPS = [[1, 1, 5], [3, 20, 4, 4], [100, 1, 16], [16, 16], [7, 33, 8]]
WAYS: list[Extend] = [definition, *([launch] if HAS_TRITON else [])]
KINDS = itertools.cycle(itertools.product(DTYPES, [64, 80]))
STORED = itertools.cycle([RowFormat, E4M3, E4M3, RowFormat])
CASES = list(zip(itertools.product(WAYS, STEPS, [8, 20]), KINDS, STORED, strict=False))
"""Formats take turns, so that each is met by each way with each of the steps, pages, dtypes and dimensions."""


@pytest.mark.parametrize(("case", "kind", "stored"), CASES)
def test_means_are_those_of_all_tokens(
    case: Case, kind: tuple[torch.dtype, int], stored: type[RowFormat], device: torch.device
) -> None:
    (extend, steps, page), (dtype, dim) = case, kind
    format = stored(dim, dtype)
    near = {"rtol": 1 / 15, "atol": 1e-2} if format.fp8 else TOLERANCE[dtype]
    torch.manual_seed(2)
    layers = [
        (
            poisoned(SEQS, HEADS, RING * page, 2, dim, dtype=dtype).to(device),
            format.encode(poisoned(SEQS, HEADS, 30 + layer, 2, dim, dtype=dtype)).to(device),
            {seq: torch.randn(HEADS, 3 * seq, 2, dim).to(dtype).to(device) for seq in (2, 0)},  # they stand differently
        )
        for layer in range(2)
    ]
    for tail, means, every in layers:
        ahead = every[2][None]
        extend([Added(ahead[:, :, :, 0], ahead[:, :, :, 1], tail, means)], [Start(2, 0)], page, format)
    for n in steps:
        starts = [Start(seq, layers[0][2][seq].shape[1]) for seq in (2, 0)]
        rows = torch.randn(2, 2, HEADS, n, 2, dim).to(dtype).to(device)
        added = [
            Added(new[:, :, :, 0], new[:, :, :, 1], tail, means) for new, (tail, means, _) in zip(rows, layers, strict=True)
        ]
        extend(added, starts, page, format)
        for new, (tail, means, every) in zip(rows, layers, strict=True):
            for seq, own in zip((2, 0), new, strict=True):
                every[seq] = torch.cat((every[seq], own), dim=1)
                tokens = every[seq].shape[1]
                pages = [part.float().mean(dim=1) for part in every[seq].split(page, dim=1)]
                found = format.decode(means[seq, :, : len(pages)]).float()
                torch.testing.assert_close(found, torch.stack(pages, dim=1), **near)
                few = min(tokens, RING * page)
                at = torch.arange(tokens - few, tokens, device=device) % (RING * page)
                assert torch.equal(tail[seq][:, at], every[seq][:, tokens - few :]), "the last rows are kept as they came"
    for tail, means, _ in layers:
        assert format.decode(means)[1].isnan().all(), "another sequence is left as it was"
        assert tail[1].isnan().all()
