"""A map with static tokens first: the definition beside a list of positions, the kernel beside the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines.kernels import static_first
from kvthaw_baselines.kernels.static_first import Pieces

FIRST, SIZE = 4, 8
SPANS: list[tuple[int, int, Pieces]] = [
    (40, 5, ((0, 0),)),
    (36, 6, ((0, 0), (13, 2), (20, 4))),  # cut at 13, where page 1 has 5 tokens, and at 20, where page 3 is empty
    (1, 1, ((0, 0),)),
    (0, 0, ((0, 0),)),
]


def tables(heads: int) -> tuple[Tensor, Tensor]:
    return torch.full((1, heads, 60), -7, dtype=torch.int32), torch.full((1, heads, 12), -7, dtype=torch.int32)


def some(tokens: int, count: int, heads: int) -> Tensor:
    chosen = torch.stack([torch.randperm(tokens)[:count].sort().values for _ in range(heads)])
    return (FIRST + chosen).int()[None]


@pytest.mark.parametrize("span", SPANS)
def test_static_tokens_come_first_and_leave_their_pages(span: tuple[int, int, Pieces]) -> None:
    tokens, pages, pieces = span
    starts = static_first.page_starts(pieces, SIZE, tokens, pages).tolist()
    if len(pieces) == 3:
        assert starts == [0, 8, 13, 20, 20, 28, 36]
    for count in sorted({0, tokens // 3, tokens}):
        (order, stops), static = tables(2), some(tokens, count, 2)
        static_first.definition(static, order, stops, [span], torch.empty(0), size=SIZE, first=FIRST)
        for h in range(2):
            chosen, found, ends = static[0, h].tolist(), order[0, h].tolist(), stops[0, h].tolist()
            assert found[:count] == chosen
            for u in range(pages):
                members = [p for p in range(FIRST + starts[u], FIRST + starts[u + 1]) if p not in chosen]
                assert found[ends[u] : ends[u + 1]] == members
            assert (ends[0], ends[pages]) == (count, tokens)
            assert set(found[tokens:]) | set(ends[pages + 1 :]) == {-7}


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_kernel_is_the_definition(share: float, device: torch.device) -> None:
    spans = [SPANS[0], SPANS[1], (1500, 188, ((0, 0),))]
    for few in (spans[:2], spans[2:]):
        count = int(share * few[0][0])
        static = torch.cat([some(tokens, count, 3) for tokens, *_ in few]).to(device)
        made = []
        for run in (static_first.definition, static_first.launch):
            order = torch.full((len(few), 3, 2400), -7, dtype=torch.int32, device=device)
            stops = torch.full((len(few), 3, 300), -7, dtype=torch.int32, device=device)
            where = torch.tensor(static_first.numbers(few), dtype=torch.int32, device=device)
            run(static, order, stops, few, where, size=SIZE, first=FIRST)
            made.append((order, stops))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])
