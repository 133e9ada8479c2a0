"""The estimate of what is not selected, by kernel and definition, against a sum over tokens in float64."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import MARK
from kvthaw.kernels.remainder import Estimated, definition, launch
from kvthaw.kernels.row_format import E4M3, RowFormat
from shapes import SHAPES, Shape, close, over_shapes

FIRST = 5


def by_tokens(
    query: Tensor, means: Tensor, rows: Tensor, known: Tensor, *, page: int, scale: float, estimated: Estimated | None = None
) -> tuple[Tensor, Tensor]:
    """Each token that is not selected has its page's mean key and mean value, or an estimated score in place of the key: written
    token by token, in float64."""
    batch, q_heads, dim = query.shape
    heads = means.shape[1]
    out, lse = torch.zeros(batch, q_heads, dim, dtype=torch.float64), torch.full((batch, q_heads), -torch.inf).double()
    for b in range(batch):
        for h in range(q_heads):
            kv = h // (q_heads // heads)
            taken = set(rows[b, kv].tolist())
            left = [t for t in range(int(known[b])) if t + FIRST not in taken]
            if left:
                pages = means[b, kv, [t // page for t in left]].double()
                logits = pages[:, 0] @ query[b, h].double() * scale
                if estimated is not None:
                    own = estimated.places[b, kv, : int(estimated.wanted[b])].tolist()
                    q = query[b, h].double()
                    more = 0.0 if estimated.centre is None else float(estimated.centre[b, kv].double() @ q)
                    for i, t in enumerate(own):
                        if t in left:
                            score = float(estimated.scores[b, kv, h % (q_heads // heads), i])
                            logits[left.index(t)] = (score + more) * scale
                lse[b, h] = logits.logsumexp(0)
                out[b, h] = logits.softmax(0) @ pages[:, 1]
    return out, lse


def case(shape: Shape, page: int, room: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    pages = -(-shape.tokens // page)
    means = torch.randn(shape.batch, shape.heads, pages + room, 2, shape.head_dim).to(shape.dtype)
    known = torch.tensor([max(0, shape.tokens - 7 * b) for b in range(shape.batch)], dtype=torch.int32)
    for b in range(shape.batch):
        means[b, :, -(-int(known[b]) // page) :] = torch.nan  # what holds no token is never read
    rows = torch.full((shape.batch, shape.heads, 24), -1, dtype=torch.int32)
    for b in range(shape.batch):
        for h in range(shape.heads):
            chosen = torch.randperm(int(known[b]))[: 20 - 3 * h]
            rows[b, h, : len(chosen)] = chosen.int() + FIRST
    return shape.query(), means, rows, known


def marks(places: Tensor, wanted: Tensor, tokens: int) -> Tensor:
    """How many of the places lie below each multiple of MARK; undefined where there are none."""
    at = torch.arange(0, tokens, MARK)
    live = torch.arange(places.shape[2]) < wanted[:, None, None]
    found = torch.stack([(live & (places < n)).sum(dim=2) for n in at.tolist()], dim=2)
    return found.masked_fill(wanted[:, None, None] == 0, 2**30).int().contiguous()


def estimates(shape: Shape, rows: Tensor, known: Tensor, count: int, centred: bool) -> Estimated:
    """Scores of the rows and of `count` other tokens of each sequence."""
    group, width = shape.q_heads // shape.heads, 24 + count
    places = torch.full((shape.batch, shape.heads, width), 2**31 - 1, dtype=torch.int32)
    scores = torch.randn(shape.batch, shape.heads, group, width) * 4
    wanted = torch.tensor([min(width, int(n)) for n in known], dtype=torch.int32)
    for b in range(shape.batch):
        for h in range(shape.heads):
            chosen = [row - FIRST for row in rows[b, h].tolist() if row >= 0]
            others = [t for t in torch.randperm(int(known[b])).tolist() if t not in chosen]
            mine = sorted(chosen + others[: int(wanted[b]) - len(chosen)])
            places[b, h, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            scores[b, h, :, [i for i, t in enumerate(mine) if t in chosen]] = -torch.inf
        scores[b, :, :, int(wanted[b]) :] = torch.nan  # past the last token nothing is read
    centre = torch.randn(shape.batch, shape.heads, shape.head_dim) if centred else None
    return Estimated(places, wanted, scores.contiguous(), marks(places, wanted, shape.tokens), centre)


@pytest.mark.parametrize(
    ("shape", "page", "centred"),
    [
        (shape, page, (turn + i) % 2 == 1)
        for turn, shape in enumerate(dict.fromkeys(SHAPES))
        for i, page in enumerate((1, 8, 24))
    ],
    ids=str,
)
def test_estimated_scores_weigh_tokens(shape: Shape, page: int, centred: bool) -> None:
    query, means, rows, known = case(shape, page)
    estimated = estimates(shape, rows, known, 40, centred)
    format = RowFormat(shape.head_dim, shape.dtype)
    found = definition(query, means, rows, known, format, first=FIRST, page=page, scale=0.3, estimated=estimated)
    out, lse = by_tokens(query, means, rows, known, page=page, scale=0.3, estimated=estimated)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.out.double(), out, rtol=1e-4, atol=1e-4)


EIGHT, PLAIN = (48, 400, E4M3), [(16, 3, RowFormat), (16, 400, RowFormat)]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("shape", "page", "count", "kind"),
    [(shape, *kind) for turn, shape in enumerate(dict.fromkeys(SHAPES)) for kind in (EIGHT, PLAIN[turn % 2])],
    ids=str,
)
def test_kernel_weighs_by_estimated_scores(
    shape: Shape, page: int, count: int, kind: type[RowFormat], device: torch.device
) -> None:
    query, means, rows, known = case(shape, page, room=70)
    estimated = estimates(shape, rows, known, count, centred=count == 3)
    query, means, rows, known = (tensor.to(device) for tensor in (query, means, rows, known))
    parts = (getattr(estimated, field.name) for field in fields(Estimated))
    estimated = Estimated(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]
    format = kind(shape.head_dim, shape.dtype)
    means = format.encode(means)
    how = {"first": FIRST, "page": page, "scale": 0.3, "estimated": estimated}
    expected = definition(query, means, rows, known, format, **how)  # type: ignore[arg-type]
    found = launch(query, means, rows, known, format, **how)  # type: ignore[arg-type]
    close(found.out, expected.out, shape.dtype)
    close(found.lse, expected.lse, torch.float32)


@over_shapes
@pytest.mark.parametrize("page", [1, 8, 24])
def test_definition_is_the_sum_over_tokens(shape: Shape, page: int) -> None:
    query, means, rows, known = case(shape, page)
    format = RowFormat(shape.head_dim, shape.dtype)
    found = definition(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    out, lse = by_tokens(query, means, rows, known, page=page, scale=0.3)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.out.double(), out, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@over_shapes
@pytest.mark.parametrize(("page", "kind"), [(1, RowFormat), (24, E4M3)])
def test_kernel_is_the_definition(shape: Shape, page: int, kind: type[RowFormat], device: torch.device) -> None:
    query, means, rows, known = (tensor.to(device) for tensor in case(shape, page, room=70))
    format = kind(shape.head_dim, shape.dtype)
    means = format.encode(means)
    expected = definition(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    found = launch(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    close(found.out, expected.out, shape.dtype)
    close(found.lse, expected.lse, torch.float32)


@pytest.mark.parametrize("estimate", [definition, *([launch] if HAS_TRITON else [])])
def test_nothing_is_left_where_all_is_selected(estimate, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    query, means = torch.randn(2, 4, 16, device=device), torch.randn(2, 2, 3, 2, 16, device=device)
    known = torch.tensor([20, 0], dtype=torch.int32, device=device)
    rows = torch.arange(24, dtype=torch.int32, device=device).where(torch.arange(24, device=device) < 20, -1).expand(2, 2, 24)
    format = RowFormat(16, torch.float32)
    found = estimate(query, means, rows.contiguous(), known, format, first=0, page=8, scale=1.0)
    assert found.lse.eq(-torch.inf).all()
    assert found.out.eq(0).all()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("loud", [1.0, 60.0])
def test_many_estimated_scores_of_many_pages(loud: float, device: torch.device) -> None:
    """Several blocks of pages for a program, several tiles of tokens for a block, and stretches without any; a token's weight may
    be many orders above its page's."""
    torch.manual_seed(3)
    heads, group, dim, page, tokens, width = 2, 3, 16, 16, 12000, 2300
    query, means = torch.randn(1, heads * group, dim), torch.randn(1, heads, tokens // page, 2, dim)
    far = torch.cat([torch.randperm(900)[:700], 2500 + torch.randperm(9500)[: width - 700]])
    places = far.sort().values.int().expand(1, heads, width).contiguous()
    scores = torch.randn(1, heads, group, width) * loud
    scores[..., ::9] = -torch.inf
    wanted = torch.tensor([width - 100], dtype=torch.int32)
    counted = marks(places, wanted, tokens)
    estimated = Estimated(*(part.to(device) for part in (places, wanted, scores, counted)))
    rows = torch.full((1, heads, 4), -1, dtype=torch.int32, device=device)
    known = torch.tensor([tokens - 3], dtype=torch.int32, device=device)
    given = query.to(device), means.to(device), rows, known, RowFormat(dim, torch.float32)
    expected = definition(*given, first=FIRST, page=page, scale=1.0, estimated=estimated)
    found = launch(*given, first=FIRST, page=page, scale=1.0, estimated=estimated)
    close(found.out, expected.out, torch.float32)
    close(found.lse, expected.lse, torch.float32)
