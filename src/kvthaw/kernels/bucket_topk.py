"""Top-k of many small-range integers without a sort (ParisKV, appendix B.2.1: bucket_topk).

The histogram gives the threshold. One pass keeps all scores above it and, of those equal to it, the lowest positions until the
requested number is reached. The result is deterministic and sorted by position.

Bytes and operations, 8 KV heads, n = 128k: one score byte per key is read (1 MB) and 4 bytes per candidate are written (420
KB at 10 %). Each program also reads 128 totals and two counts of each earlier chunk (at most 4 KB at 1M tokens, from L2).
The transfers take under 1 us; the cost is the launch and the chain histogram -> prefix -> store. A thread takes 16 keys,
four scores per word. One addition sets the upper bit of each byte that reaches the threshold. One multiplication adds up
the four bits, and one prefix sum runs over the threads. Ties are cut in one chunk only; in all others they are entirely
above or entirely below the limit. A thread stores its prefix too, 4 bytes for MARK keys (256 KB). With it, later kernels find
the candidates of any stretch of keys by two loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.collide import BINS, CHUNK, Scores

WARPS = 4
MARK = 16
"""Keys of a thread."""


def definition(scores: Tensor, lengths: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Find the wanted[l] <= width largest of scores[l, h, : lengths[l]].

    Returns their positions [L, H, width] int32, ascending, -1 padded, and marks [L, H, ceil(n / MARK)] int32: how many of
    them are below position m MARK. Ties go to the lowest position. By a histogram, as in the kernel.
    """
    batch, heads, n = scores.shape
    known = (torch.arange(n, device=scores.device) < lengths[:, None])[:, None]
    value = torch.where(known, scores.long(), BINS)
    counts = torch.zeros((batch, heads, BINS + 1), dtype=torch.int64, device=scores.device)
    counts.scatter_add_(2, value, torch.ones_like(value))
    at_least = counts[:, :, :BINS].flip(2).cumsum(dim=2).flip(2)
    goal = torch.minimum(wanted, lengths)[:, None, None]
    threshold = (at_least >= goal).sum(dim=2, keepdim=True) - 1
    above = known & (value > threshold)
    tie = known & (value == threshold)
    keep = above | (tie & (tie.cumsum(dim=2) <= goal - above.sum(dim=2, keepdim=True)))
    until = keep.cumsum(dim=2)
    return _compact(keep, until, width), (until[:, :, ::MARK] - keep[:, :, ::MARK].long()).int()


def compact(keep: Tensor, width: int) -> Tensor:
    """Return the positions of True in keep [L, H, n], ascending, [L, H, width] int32, -1 padded. At most width per row."""
    return _compact(keep, keep.cumsum(dim=2), width)


def _compact(keep: Tensor, until: Tensor, width: int) -> Tensor:
    out = torch.full((*keep.shape[:2], width + 1), -1, dtype=torch.int32, device=keep.device)
    slot = torch.where(keep, until - 1, width)
    place = torch.arange(keep.shape[2], dtype=torch.int32, device=keep.device)
    out.scatter_(2, slot, place.expand_as(slot))
    return out[:, :, :width]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _reached(x, limit):
        # Set the upper bit of each byte of x (0 to 127) that is at least limit (0 to 128).
        return (x + (128 - limit) * 0x01010101) & -0x7F7F7F80

    @triton.jit
    def _until(bits, n):
        # Keep the bits of the first n bytes.
        return tl.where(n >= 4, bits, tl.where(n <= 0, 0, bits & ((1 << (8 * (n & 3))) - 1)))

    @triton.jit
    def _sum(bits):
        return (bits >> 7 & 0x01010101) * 0x01010101 >> 24

    @triton.jit
    def _first(bits, ties, rank, quota):
        # Drop the ties whose rank is at least quota. rank: of a word's first tie; returns that of the next word's.
        for j in tl.static_range(4):
            one = ties >> (8 * j + 7) & 1
            bits = tl.where((one > 0) & (rank >= quota), bits & ~(tl.full((), 128, tl.int32) << (8 * j)), bits)
            rank += one
        return bits, rank

    @triton.jit
    def _store(out, slot, place, bits):
        for j in tl.static_range(4):
            one = bits >> (8 * j + 7) & 1
            tl.store(out + slot, place + j, mask=one > 0)
            slot += one
        return slot

    @triton.jit
    def _bucket_topk(scores, counts, totals, lengths, wanted, out, marks, heads, words, chunks, width, BINS: tl.constexpr,
                     CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: CHUNK keys of one KV head. scores: words of four bytes.
        chunk = tl.program_id(0)
        seq = tl.program_id(2)
        pair = (seq * heads + tl.program_id(1)).to(tl.int64)
        length = tl.load(lengths + seq)
        want = tl.load(wanted + seq)
        follow(PDL)
        if (chunk * CHUNK < length) & (want > 0):
            # Split what a thread loads at once into tensors of one word per thread, so that the stores, whose order the
            # compiler does not know, need no layout conversion.
            i = tl.arange(0, CHUNK // 16)
            x = tl.load(scores + pair * words + (chunk * (CHUNK // 4) + 4 * i)[:, None] + tl.arange(0, 4)[None, :])
            even, odd = tl.split(tl.reshape(x, (CHUNK // 16, 2, 2)))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            bin = tl.arange(0, BINS)
            total = tl.load(totals + pair * BINS + bin)
            threshold = tl.sum((total >= want).to(tl.int32)) - 1
            c = tl.arange(0, CHUNKS)
            at = counts + (pair * BINS + threshold) * chunks
            higher = threshold + 1 < BINS
            at_least = tl.load(at + c, mask=c < chunk, other=0)
            over = tl.load(at + chunks + c, mask=(c < chunk) & higher, other=0)
            here = tl.load(at + chunk) - tl.load(at + chunks + chunk, mask=higher, other=0)  # ties in this chunk
            quota = want - tl.sum(tl.where(bin == threshold + 1, total, 0))  # how many ties to keep
            above = tl.sum(over)
            ties = tl.sum(at_least) - above
            limit = tl.where(ties < quota, threshold, threshold + 1)
            kept0, kept1, kept2, kept3 = _reached(x0, limit), _reached(x1, limit), _reached(x2, limit), _reached(x3, limit)
            place = chunk * CHUNK + 16 * i
            left = length - place
            if chunk * CHUNK + CHUNK > length:
                kept0, kept1 = _until(kept0, left), _until(kept1, left - 4)
                kept2, kept3 = _until(kept2, left - 8), _until(kept3, left - 12)
            if (ties < quota) & (ties + here > quota):
                tie0, tie1 = kept0 & ~_reached(x0, limit + 1), kept1 & ~_reached(x1, limit + 1)
                tie2, tie3 = kept2 & ~_reached(x2, limit + 1), kept3 & ~_reached(x3, limit + 1)
                number = _sum(tie0) + _sum(tie1) + _sum(tie2) + _sum(tie3)
                rank = ties + tl.cumsum(number, axis=0) - number
                kept0, rank = _first(kept0, tie0, rank, quota)
                kept1, rank = _first(kept1, tie1, rank, quota)
                kept2, rank = _first(kept2, tie2, rank, quota)
                kept3, rank = _first(kept3, tie3, rank, quota)
            number = _sum(kept0) + _sum(kept1) + _sum(kept2) + _sum(kept3)
            slot = above + tl.minimum(ties, quota) + tl.cumsum(number, axis=0) - number
            tl.store(marks + pair * (words // 4) + chunk * (CHUNK // 16) + i, slot)
            slot = _store(out + pair * width, slot, place, kept0)
            slot = _store(out + pair * width, slot, place + 4, kept1)
            slot = _store(out + pair * width, slot, place + 8, kept2)
            slot = _store(out + pair * width, slot, place + 12, kept3)


def launch(found: Scores, lengths: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device. Leaves entries from wanted[l] on unwritten, and marks of a chunk without keys."""
    batch, heads, capacity = found.scores.shape
    bins, chunks = found.counts.shape[2:]
    assert bins == BINS and found.scores.dtype == torch.uint8, "comparing four scores at once needs a spare bit in each byte"
    assert found.scores.is_contiguous() and found.counts.is_contiguous() and found.totals.is_contiguous()
    assert lengths.dtype == wanted.dtype == torch.int32 and capacity == chunks * CHUNK
    out, marks = (
        torch.empty((batch, heads, n), dtype=torch.int32, device=found.scores.device) for n in (width, capacity // MARK)
    )
    _bucket_topk[(chunks, heads, batch)](
        found.scores.view(torch.int32), found.counts, found.totals, lengths, wanted, out, marks, heads, capacity // 4, chunks,
        width, BINS=bins, CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), num_warps=WARPS,
        **dependent(out.device),
    )  # fmt: skip
    return out, marks


def bucket_topk(found: Scores | Tensor, lengths: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Find the wanted[l] <= min(width, lengths[l]) best scores of each sequence.

    Returns candidates [L, H, width] int32, ascending, and marks [L, H, ceil(n / MARK)] int32: how many candidates are below
    position m MARK. Scores are less than BINS. Candidates from wanted[l] on are undefined on a GPU, else -1. A GPU leaves marks
    of chunks without keys undefined.
    """
    if isinstance(found, Scores):
        return launch(found, lengths, wanted, width)
    return definition(found, lengths, wanted, width)
