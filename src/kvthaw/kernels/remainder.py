"""Attention to what was not selected, estimated from the mean key and the mean value of each page.

A page has n tokens, and the step selects m of them. The kernel treats the rest as n - m equal tokens: their weight is (n - m)
exp(scale q.mean key), and their value is the page's mean value. `Partial` merges the estimate with the exact attention by
log-sum-exp.

An index may estimate the scores of many more tokens than it selects. Each of these c tokens then weighs exp(scale score), still
with the page's mean value, and n - m - c equal tokens remain.

A step reads every mean once: 2 D numbers for each page, KV head and sequence. With 128k tokens, 8 heads and D = 128 these are 8.4
MB for pages of 64 tokens in bf16 (1.7 us at 4.8 TB/s). In e4m3 they are 4.3 MB, and each number is converted. With 13k estimated
scores a KV head, 4 bytes for each of four query heads are 1.7 MB more. A page's scores are consecutive, and two marks say where
they lie, so no program reads positions or waits for the scores of earlier pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import MARK
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gpu import by_device, nvidia
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.split import multiprocessors, triton_block

_BLOCK = 64
"""Pages that a program reads at once."""
_ROWS = 1024
"""Rows that a program counts at once."""
_SCORES = 8
"""Estimated scores of a page and query head that a thread loads at once."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """Tokens with estimated scores, the selected ones among them.

    places [B, H, W] int32: positions from `first` on, ascending. wanted [B] int32: how many of the W there are. scores [B, H, Hq /
    H, W] float32: estimates of q.k, -inf for a selected token. marks [B, H, M] int32: how many places are below m MARK, for all
    m MARK < known. centre [B, H, D]: what was subtracted from the keys before; None: nothing. Numbers past wanted are undefined.
    """

    places: Tensor
    wanted: Tensor
    scores: Tensor
    marks: Tensor
    centre: Tensor | None = None


def definition(query: Tensor, means: Tensor, rows: Tensor, known: Tensor, format: RowFormat, *, first: int, page: int,
               scale: float, estimated: Estimated | None = None) -> Partial:  # fmt: skip
    """Estimate the attention to the tokens first .. first + known[b] that are not among the rows.

    query [B, Hq, D]. means [B, H, P, *format.tail]: mean key and mean value of the pages. Page p has the tokens from
    first + p * page on. rows [B, H, M] int32: the selected positions, each once, -1 padded. known [B] int32. scale multiplies q.k.
    estimated: tokens that weigh by scores of their own instead of their page's mean key. All of `rows` must be among them.
    Returns out [B, Hq, D] and lse [B, Hq] in float32; lse is -inf where every token is selected.
    """
    batch, heads, pages = means.shape[:3]
    place = torch.arange(pages, device=query.device) * page
    sizes = (known[:, None] - place).clamp(min=0, max=page)[:, None]
    listed = torch.where(rows >= 0, (rows - first) // page, pages)
    if estimated is not None:
        live = torch.arange(estimated.places.shape[2], device=query.device) < estimated.wanted[:, None, None]
        listed = torch.where(live, estimated.places // page, pages)
    listed = listed.clamp(max=pages).long()
    counted = torch.zeros((batch, heads, pages + 1), dtype=torch.float32, device=query.device)
    counted.scatter_add_(2, listed, torch.ones_like(listed, dtype=torch.float32))
    left = (sizes - counted[:, :, :pages]).clamp(min=0)
    grouped, (keys, values) = query.float().unflatten(1, (heads, -1)), format.decode(means).float().unbind(3)
    empty = (sizes == 0)[..., None]
    keys, values = keys.masked_fill(empty, 0.0), values.masked_fill(empty, 0.0)
    logits = grouped @ keys.mT * scale + left.log()[:, :, None]
    if estimated is not None:
        own = (estimated.scores * scale).masked_fill(~live[:, :, None], -torch.inf)
        if estimated.centre is not None:
            own = own + grouped @ estimated.centre.float()[..., None] * scale
        top = own.amax(dim=3, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        sums = logits.new_zeros((*logits.shape[:3], pages + 1))
        sums.scatter_add_(3, listed[:, :, None].expand_as(own), torch.exp(own - top))
        logits = torch.logaddexp(logits, sums[..., :pages].log() + top)
    lse = torch.logsumexp(logits, dim=3)
    share = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return Partial((share @ values).flatten(1, 2), lse.flatten(1, 2))


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.row_format import load_codes

    LN2 = tl.constexpr(0.6931471805599453)

    @triton.jit
    def _of_pages(row, begin, first, PAGE: tl.constexpr, BLOCK_P: tl.constexpr):
        # Return how many of the rows each of the BLOCK_P pages from `begin` on has.
        page = (row - first) // PAGE - begin
        return tl.histogram(page, BLOCK_P, mask=(row >= first) & (page >= 0) & (page < BLOCK_P))

    @triton.jit
    def _remainder(
        query, means, rows, known, marks, wanted, scores, centre, out_parts, lse_parts, pages, per, first, scale, width, marked,
        listed, splits, q_seq, q_head, m_seq, m_head, m_page, m_value, r_seq, r_head, PAGE: tl.constexpr, MARK: tl.constexpr,
        HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, PADDED: tl.constexpr, SCORES: tl.constexpr, OWN: tl.constexpr,
        CENTRED: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        # Program (sequence and KV head; split of the pages). OWN: tokens with estimated scores, which include the rows.
        pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
        b, h = pair // HEADS, pair % HEADS
        g, d, x, m = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
        head = h * GROUP + g
        is_head, is_dim = g < GROUP, d < DIM
        q = tl.load(query + b * q_seq + head[:, None] * q_head + d[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        tokens = tl.load(known + b)
        follow(PDL)
        stop = tl.minimum(tl.minimum((split + 1) * per, pages), (tokens + PAGE - 1) // PAGE)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        if OWN:
            marks += pair * marked
            scores += pair * GROUP * listed
            count = tl.load(wanted + b)
            lane = tl.arange(0, PADDED)
            is_lane = lane < GROUP
            moved = tl.zeros((PADDED,), tl.float32)
            if CENTRED:
                its = query + b * q_seq + (h * GROUP + lane)[:, None] * q_head + d[None, :]
                middle = tl.load(centre + pair * DIM + d, mask=is_dim, other=0.0).to(tl.float32)
                its = tl.load(its, mask=is_lane[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
                moved = tl.sum(its * middle[None, :], 1) * scale
        else:
            mine = rows + b * r_seq + h * r_head
            row = tl.load(mine + m, mask=m < width, other=-1)  # one trip to memory, while the first means come
        for begin in range(split * per, stop, BLOCK_P):
            page = begin + x
            live = page < stop
            inside = live[:, None] & is_dim[None, :]
            where = means + b * m_seq + h * m_head + page.to(tl.int64) * m_page
            if FP8:
                k, k_scale = load_codes(where.to(tl.int64), live, d, 0, DIM, q.dtype, NATIVE)
                v, v_scale = load_codes(where.to(tl.int64), live, d, 1, DIM, q.dtype, NATIVE)
            else:
                k = tl.load(where[:, None] + d[None, :], mask=inside, other=0.0)
                v = tl.load(where[:, None] + m_value + d[None, :], mask=inside, other=0.0)
                if UPCAST:
                    k, v = k.to(tl.float32), v.to(tl.float32)
            left = tl.minimum(tl.maximum(tokens - page * PAGE, 0), PAGE)
            if OWN:  # a page's scores are consecutive
                after = (page + 1) * PAGE
                start = tl.load(marks + page * (PAGE // MARK), mask=live & (count > 0), other=0)
                end = tl.load(marks + after // MARK, mask=live & (count > 0) & (after < tokens), other=0)
                end = tl.where(live & (after >= tokens), count, end)
                left -= end - start
                best = tl.full((PADDED, BLOCK_P), float("-inf"), tl.float32)
                mass = tl.zeros((PADDED, BLOCK_P), tl.float32)
                for earlier in range(0, tl.max(end - start), SCORES):
                    logits, new = (), best
                    for i in tl.static_range(SCORES):  # a thread takes a page's, so that it adds them up alone
                        at = start + earlier + i
                        there = is_lane[:, None] & (at < end)[None, :]
                        logit = tl.load(scores + lane[:, None] * listed + at[None, :], mask=there, other=float("-inf"))
                        logits += (logit * scale + moved[:, None],)  # type: ignore[assignment]
                        new = tl.maximum(new, logits[i])
                    shift = tl.where(new == float("-inf"), 0.0, new)
                    mass *= tl.exp2(best - shift)
                    for i in tl.static_range(SCORES):
                        mass += tl.exp2(logits[i] - shift)
                    best = new
                best = tl.where(mass > 0, best + tl.log2(tl.maximum(mass, 1e-30)), float("-inf"))
                best = tl.broadcast_to(best[None, :, :], (BLOCK_G // PADDED, PADDED, BLOCK_P))
                best = tl.reshape(best, (BLOCK_G, BLOCK_P))  # rows past the group repeat, and none of them is stored
            else:
                left -= _of_pages(row, begin, first, PAGE, BLOCK_P)
                for start in range(BLOCK_M, width, BLOCK_M):
                    later = tl.load(mine + start + m, mask=start + m < width, other=-1)
                    left -= _of_pages(later, begin, first, PAGE, BLOCK_P)
            counts = live & (left > 0)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if FP8:
                score *= k_scale[None, :]
            score += tl.log2(tl.maximum(left, 1).to(tl.float32))[None, :]
            score = tl.where(counts[None, :], score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            if OWN:
                new = tl.maximum(new, tl.max(best, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weight = tl.exp2(score - shift[:, None])
            if OWN:
                weight += tl.exp2(best - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weight, 1)
            if FP8:
                weight *= v_scale[None, :]
            acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
            top = new
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        lse = tl.where(some, tl.where(some, top, 0.0) + tl.log2(divisor), float("-inf"))
        part = (b * HEADS * GROUP + head) * splits + split
        tl.store(lse_parts + part, lse, mask=is_head)
        filled = is_head[:, None] & is_dim[None, :]
        tl.store(out_parts + part[:, None] * DIM + d[None, :], acc / divisor[:, None], mask=filled)

    @triton.jit
    def _merge_splits(out_parts, lse_parts, out, lse, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
        # Program (sequence and query head): merge its splits.
        follow(PDL)
        head = tl.program_id(0).to(tl.int64)
        s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        every = tl.load(lse_parts + head * splits + s, mask=s < splits, other=float("-inf"))
        top = tl.max(every, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(every - shift)
        total = tl.sum(share, 0)
        inside = (s < splits)[:, None] & (d < DIM)[None, :]
        parts = tl.load(out_parts + (head * splits + s)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        mixed = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out + head * DIM + d, mixed, mask=d < DIM)
        tl.store(lse + head, tl.where(total > 0, (shift + tl.log2(tl.maximum(total, 1.0))) * LN2, float("-inf")))


def launch(query: Tensor, means: Tensor, rows: Tensor, known: Tensor, format: RowFormat, *, first: int, page: int,
           scale: float, estimated: Estimated | None = None) -> Partial:  # fmt: skip
    """Launch the Triton kernels; arguments and results as in `definition`. Shapes are static, and nothing waits for the device."""
    (batch, heads, pages), dim, q_heads, width = means.shape[:3], format.dim, query.shape[1], rows.shape[2]
    assert means.dtype == format.stored
    assert means.stride(-1) == query.stride(2) == rows.stride(2) == known.stride(0) == 1
    assert rows.dtype == known.dtype == torch.int32
    marks, wanted, scores, centre = rows, known, query, None
    if estimated is not None:
        marks, wanted, scores, centre = estimated.marks, estimated.wanted, estimated.scores, estimated.centre
        assert marks.is_contiguous() and scores.is_contiguous() and wanted.stride(0) == 1
        assert marks.dtype == wanted.dtype == torch.int32 and scores.dtype == torch.float32
        assert centre is None or centre.is_contiguous()
        assert page % MARK == 0, f"a page of {page} tokens is no whole number of {MARK}"
    interpreted = query.device.type == "cpu"
    room = 2 * multiprocessors(query.device) if not interpreted else 3
    splits = max(1, min(64, room // (batch * heads), -(-pages // _BLOCK)))
    per = triton.cdiv(triton.cdiv(pages, splits), _BLOCK) * _BLOCK
    out = torch.empty((batch, q_heads, dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((batch, q_heads), dtype=torch.float32, device=query.device)
    out_parts = torch.empty((batch, q_heads, splits, dim), dtype=torch.float32, device=query.device)
    lse_parts = torch.empty((batch, q_heads, splits), dtype=torch.float32, device=query.device)
    group, block_d, follows = q_heads // heads, triton_block(dim, 16), dependent(query.device)
    padded = triton_block(group)
    _remainder[(batch * heads, splits)](
        query, means, rows, known, marks, wanted, scores, query if centre is None else centre, out_parts, lse_parts, pages, per,
        first, scale * 1.4426950408889634, width, marks.shape[2], scores.shape[-1], splits,
        *query.stride()[:2], *means.stride()[:4], *rows.stride()[:2], PAGE=page, MARK=MARK, HEADS=heads, GROUP=group, DIM=dim,
        BLOCK_G=triton_block(group, 16), BLOCK_D=block_d, BLOCK_P=_BLOCK, BLOCK_M=min(_ROWS, triton_block(width, 16)),
        PADDED=padded, SCORES=_SCORES, OWN=estimated is not None, CENTRED=centre is not None,
        UPCAST=interpreted, FP8=format.fp8, NATIVE=nvidia(query.device, (8, 9)), num_warps=4, **follows,
    )  # fmt: skip
    _merge_splits[(batch * q_heads,)](
        out_parts, lse_parts, out, lse, splits, DIM=dim, BLOCK_D=block_d, BLOCK_S=triton_block(splits), num_warps=1,
        **follows,
    )  # fmt: skip
    return Partial(out, lse)


remainder = by_device(launch, definition)
