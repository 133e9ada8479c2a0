"""The best of many small-range integers, without a sort (ParisKV, appendix B.2.1: bucket_topk).

Threshold from the histogram, then one pass that keeps what is above it and, of those on it, the lowest positions until the
number wanted is reached: exactly that many, in the order of positions, the same in every run.

Bytes and operations, 8 KV heads, n = 128k: a score byte a key read (1 MB), 4 bytes a candidate written (420 KB at 10 %), and
per program 128 totals and two counts of each earlier chunk (at most 4 KB at 1M tokens, from L2). Under 1 us of transfer; the
launch and the chain histogram -> prefix -> store are what it costs, 3 us.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import chained
from kvthaw.kernels.collide import CHUNK, Scores

WARPS = 4


def definition(scores: Tensor, lengths: Tensor, wanted: Tensor, width: int) -> Tensor:
    """Positions [L, H, width] int32, ascending, -1 padded: the wanted[l] <= width largest of scores[l, h, : lengths[l]].

    Of equal scores the lowest position comes first.
    """
    lanes, heads, n = scores.shape
    place = torch.arange(n, device=scores.device)
    known = (place < lengths[:, None])[:, None]
    value = torch.where(known, scores.int(), -1)
    # rank of a key: keys with a larger score, plus earlier ones with the same
    order = torch.sort(value, dim=2, descending=True, stable=True).indices
    keep = torch.zeros((lanes, heads, n), dtype=torch.bool, device=scores.device)
    keep.scatter_(2, order, (place < torch.minimum(wanted, lengths)[:, None])[:, None].expand(-1, heads, -1))
    return compact(keep, width)


def compact(keep: Tensor, width: int) -> Tensor:
    """The positions of True in keep [L, H, n], ascending, as [L, H, width] int32, -1 padded. At most width a row."""
    out = torch.full((*keep.shape[:2], width + 1), -1, dtype=torch.int32, device=keep.device)
    slot = torch.where(keep, keep.cumsum(dim=2) - 1, width)
    place = torch.arange(keep.shape[2], dtype=torch.int32, device=keep.device)
    out.scatter_(2, slot, place.expand_as(slot))
    return out[:, :, :width]


def by_counting(scores: Tensor, lengths: Tensor, wanted: Tensor, width: int, values: int) -> Tensor:
    """As `definition`, by a histogram of `values` bins: what the kernel does, in torch."""
    lanes, heads, n = scores.shape
    known = (torch.arange(n, device=scores.device) < lengths[:, None])[:, None]
    value = torch.where(known, scores.long(), values)
    counts = torch.zeros((lanes, heads, values + 1), dtype=torch.int64, device=scores.device)
    counts.scatter_add_(2, value, torch.ones_like(value))
    at_least = counts[:, :, :values].flip(2).cumsum(dim=2).flip(2)
    goal = torch.minimum(wanted, lengths)[:, None, None]
    threshold = (at_least >= goal).sum(dim=2, keepdim=True) - 1
    above = known & (value > threshold)
    tie = known & (value == threshold)
    keep = above | (tie & (tie.cumsum(dim=2) <= goal - above.sum(dim=2, keepdim=True)))
    return compact(keep, width)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _bucket_topk(scores, counts, totals, lengths, wanted, out, heads, capacity, chunks, width, BINS: tl.constexpr,
                     CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # One program: CHUNK keys of one KV head.
        follow(PDL)
        chunk = tl.program_id(0)
        lane = tl.program_id(2)
        pair = (lane * heads + tl.program_id(1)).to(tl.int64)
        length = tl.load(lengths + lane)
        want = tl.load(wanted + lane)
        if (chunk * CHUNK < length) & (want > 0):
            bin = tl.arange(0, BINS)
            total = tl.load(totals + pair * BINS + bin)
            threshold = tl.sum((total >= want).to(tl.int32)) - 1
            quota = want - tl.sum(tl.where(bin == threshold + 1, total, 0))  # how many of those on the threshold are kept
            c = tl.arange(0, CHUNKS)
            at = counts + (pair * BINS + threshold) * chunks + c
            at_least = tl.sum(tl.load(at, mask=c < chunk, other=0))
            above = tl.sum(tl.load(at + chunks, mask=(c < chunk) & (threshold + 1 < BINS), other=0))
            place = chunk * CHUNK + tl.arange(0, CHUNK)
            score = tl.load(scores + pair * capacity + place).to(tl.int32)
            known = place < length
            over = ((score > threshold) & known).to(tl.int32)
            tie = ((score == threshold) & known).to(tl.int32)
            both = tl.cumsum(over + (tie << 16), axis=0) - over - (tie << 16)  # both ranks in the halves of a word
            rank = at_least - above + (both >> 16)
            slot = above + (both & 0xFFFF) + tl.minimum(rank, quota)
            tl.store(out + pair * width + slot, place, mask=(over > 0) | ((tie > 0) & (rank < quota)))


def launch(found: Scores, lengths: Tensor, wanted: Tensor, width: int) -> Tensor:
    """The kernel, on whatever device the scores are. Entries from wanted[l] on are left as they were."""
    assert found.counts is not None and found.totals is not None
    lanes, heads, capacity = found.scores.shape
    bins, chunks = found.counts.shape[2:]
    assert found.scores.is_contiguous() and found.counts.is_contiguous() and found.totals.is_contiguous()
    assert lengths.dtype == wanted.dtype == torch.int32 and capacity == chunks * CHUNK
    out = torch.empty((lanes, heads, width), dtype=torch.int32, device=found.scores.device)
    pdl = chained(out.device)
    _bucket_topk[(chunks, heads, lanes)](
        found.scores, found.counts, found.totals, lengths, wanted, out, heads, capacity, chunks, width, BINS=bins, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks), PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def bucket_topk(found: Scores, lengths: Tensor, wanted: Tensor, width: int, values: int) -> Tensor:
    """Candidates [L, H, width] int32, ascending: the wanted[l] <= min(width, lengths[l]) best scores of each lane. values: how
    many scores there can be. On a GPU entries beyond wanted[l] hold anything, else -1."""
    if found.scores.is_cuda and found.counts is not None:
        return launch(found, lengths, wanted, width)
    return by_counting(found.scores, lengths, wanted, width, values)
