"""Reorder a sequence's tokens in place: static tokens first, then the pages of the text without them.

Every place of the map is written once, 4 bytes a token and head (4.2 MB at 128k tokens of 8 heads: 1 us at 4300 GB/s), after two
searches among the static positions, which stay in cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device

Pieces = tuple[tuple[int, int], ...]
"""Where pages of full size begin: (token, page) pairs, ascending from (0, 0). A page before such a place may be smaller."""


def page_starts(pieces: Pieces, size: int, tokens: int, pages: int) -> Tensor:
    """Return where each of `pages` pages of the text begins, and where the last one ends, [pages + 1] int64."""
    page, found = torch.arange(pages + 1), torch.zeros(pages + 1, dtype=torch.int64)
    for token, before in pieces:
        found = torch.where(page >= before, token + (page - before) * size, found.clamp(max=token))
    return found.clamp(max=tokens)


def definition(
    static: Tensor,
    order: Tensor,
    stops: Tensor,
    spans: Sequence[tuple[int, int, Pieces]],
    where: Tensor,
    *,
    size: int,
    first: int,
) -> None:
    """Write the order of tokens and the stops of their pages, for R sequences, one per entry of spans.

    order: [R, H, T] int32.
    stops: [R, H, U + 1] int32.

    static [R, H, C] int32: ascending positions among the first `tokens` of each sequence.
    spans: (tokens, pages, pieces) of each sequence.
    where: [R, 2 + 2 P] int32, the spans on the device, as `numbers` returns them; the kernel alone needs it.

    Places 0 .. C hold the static positions, the following ones the others in text order. Page u is order[stops[u] : stops[u
    + 1]]. Places and pages behind stay as they are.
    """
    count = static.shape[2]
    for chosen, places, ends, (tokens, pages, pieces) in zip((static - first).long(), order, stops, spans, strict=True):
        starts = page_starts(pieces, size, tokens, pages).to(order.device).expand(len(chosen), -1).contiguous()
        rest = torch.arange(tokens - count, device=order.device).expand(len(chosen), -1).contiguous()
        passed = torch.searchsorted((chosen - torch.arange(count, device=order.device)).contiguous(), rest, right=True)
        places[:, :count] = (chosen + first).int()
        places[:, count:tokens] = (rest + passed + first).int()
        ends[:, : pages + 1] = (count + starts - torch.searchsorted(chosen.contiguous(), starts)).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _below(static, bound, count, first, SHIFTED: tl.constexpr, ROUNDS: tl.constexpr):
        # Return how many static tokens i lie before a token `bound`; SHIFTED: how many have at most `bound` others before them.
        low = bound * 0
        high = low + count
        for _ in tl.static_range(ROUNDS):
            middle = (low + high) // 2
            inside = low < high
            token = tl.load(static + middle, mask=inside, other=0) - first
            passed = inside & ((token - middle <= bound) if SHIFTED else (token < bound))
            low = tl.where(passed, middle + 1, low)
            high = tl.where(inside & ~passed, middle, high)
        return low

    @triton.jit(do_not_specialize=["order_head", "stops_head", "count", "pieces", "first"])
    def _static_first(static, order, stops, spans, heads, count, pieces, size, first, order_head, stops_head,
                      ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        # Program (block of places and of pages; head; sequence).
        h, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
        span = spans + r * (2 + 2 * pieces)
        tokens, pages = tl.load(span), tl.load(span + 1)
        pair = r * heads + h
        static += pair * count
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        rest = i - count
        other = rest + _below(static, rest, count, first, True, ROUNDS) + first
        chosen = tl.load(static + i, mask=i < count, other=0)
        tl.store(order + pair * order_head + i, tl.where(i < count, chosen, other), mask=i < tokens)
        if tl.program_id(0) * BLOCK <= pages:
            start = tl.zeros([BLOCK], tl.int32)
            for piece in range(pieces):
                token, before = tl.load(span + 2 + 2 * piece), tl.load(span + 3 + 2 * piece)
                start = tl.where(i >= before, token + (i - before) * size, tl.minimum(start, token))
            start = tl.minimum(start, tokens)
            stop = count + start - _below(static, start, count, first, False, ROUNDS)
            tl.store(stops + pair * stops_head + i, stop, mask=i <= pages)


def launch(
    static: Tensor,
    order: Tensor,
    stops: Tensor,
    spans: Sequence[tuple[int, int, Pieces]],
    where: Tensor,
    *,
    size: int,
    first: int,
) -> None:
    """Launch the Triton kernel; arguments as in `definition`. All tensors are contiguous."""
    (seqs, heads, count), longest = static.shape, max(max(tokens, pages + 1) for tokens, pages, _ in spans)
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (static, order, stops, where))
    assert len(order) == len(stops) == len(where) == len(spans) == seqs
    assert all(tokens <= order.shape[2] and pages < stops.shape[2] for tokens, pages, _ in spans), "no room"
    _static_first[(triton.cdiv(longest, 1024), heads, seqs)](
        static, order, stops, where, heads, count, where.shape[1] // 2 - 1, size, first, order.shape[2], stops.shape[2],
        ROUNDS=count.bit_length(), BLOCK=1024, num_warps=4,
    )  # fmt: skip


def numbers(spans: Sequence[tuple[int, int, Pieces]]) -> list[tuple[int, ...]]:
    """Return spans as rows of equal length: tokens, pages, then the numbers of the pieces. Shorter rows repeat their last
    piece."""
    most, rows = max(len(pieces) for *_, pieces in spans), []
    for tokens, pages, pieces in spans:
        padded = pieces + pieces[-1:] * (most - len(pieces))
        rows.append((tokens, pages, *(number for piece in padded for number in piece)))
    return rows


static_first = by_device(launch, definition)
