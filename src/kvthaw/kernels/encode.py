"""Key summaries on the device: centroid ids, codes and weights (ParisKV, sections 4.1.2 and 4.1.3).

The rotated key y is cut into B = d' / 8 subspaces y_b. In each, the id is the sign pattern (bit j set where y_bj >= 0). The
code holds a sign and a magnitude bin for each coordinate of u_b = y_b / |y_b|. The weight is |y_b| / <v_b, u_b>, with
v_b the decoded code. This is the paper's |k| r_b / alpha_b, since |y_b| = |k| r_b.

A Quantizer has one of two forms. With 4 bits, the paper's, a nibble is a sign and one of 8 magnitudes. Weights are bfloat16 in a
table: at d' = 128 these are 16 + 64 + 32 = 112 bytes. With 3 bits there are 4 magnitudes, and a nibble's top bit is free. The
eight top bits of a word are its weight, rounded to 8 bits: 16 + 64 = 80 bytes.

Bytes and operations for 8 x 128k keys of 128 bf16: 268 MB of keys read, 117 MB written with 4 bits and 84 MB with 3: 0.09 and
0.08 ms at 4200 GB/s. The rotation takes 34 GFLOP on tensor cores. 27 instructions per coordinate surround it with 4 bits and 20
with 3, as compiled for sm_90 (3.6 and 2.7 G; 0.13 and 0.10 ms where nothing waits, overlapping the loads). Comparisons and
selections run at half the rate of multiply-adds on Hopper, so levels are summed. A threshold adds its step times a saturated
multiply-add, which is 1 above it and 0 below. The level, times a slope and rounded, is its number. The columns of the rotation
are ordered so that one thread holds the 8 coordinates of a subspace and no sum crosses threads. Counting the cluster sizes
reads the 17 MB of ids once more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.srht import Rotation, srht

SUB = 8
"""Coordinates per subspace, m."""
CENTROIDS = 1 << SUB
PROGRAMS = 256
"""Programs that fill a GPU; more are launched only if each already has LOOPS blocks of keys."""
BLOCK, LOOPS, STAGES, WARPS = 64, 64, 3, 4
"""Keys per block, maximum blocks per program, pipeline stages and warps. Beyond 128 coordinates: one stage, twice the warps."""
SHARP = 2.0**60
"""What differences to a threshold are multiplied by before they saturate."""
LARGEST = 17
"""Largest exponent of a weight in 8 bits: 5 of exponent, 3 of mantissa, from 2^-14 to 245,760, and no zero."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """The form of a key's code, and where the weight is.

    bits: of a coordinate, sign included. 4: weights are a table, bfloat16. 3: weights are in the codes, see `pack`.
    thresholds, levels: [2^(bits - 1) - 1] and [2^bits] float32, the value of each code, whose highest bit is the sign. Levels
        are odd multiples of 1 / 256: a byte v means (v + 1/2) / 128, and its complement the negated level.
    bytes: two 32-bit words of levels as bytes. 4 bits: the eight positive ones. 3 bits: the positive ones and the negative ones.
    constants: the thresholds, and the positive levels times 128.
    slope: of a line through the positive levels times 128 that, rounded, is their number.
    """

    bits: int
    thresholds: Tensor
    levels: Tensor
    bytes: tuple[int, int]
    constants: tuple[tuple[float, ...], tuple[float, ...]]
    slope: float

    def tables(self, heads: int, subs: int) -> dict[str, tuple[tuple[int | str, ...], torch.dtype]]:
        """Return shape and dtype of a sequence's tables, by name; axis 1 grows with its tokens."""
        kinds = {"codes": torch.int32} | ({} if self.bits == 3 else {"weights": torch.bfloat16})
        return {name: ((heads, "tokens", subs), dtype) for name, dtype in kinds.items()}

    @property
    def unit(self) -> float:
        """What a weight in a word, read as float32, is multiplied by; 1 for a table's."""
        return 2.0**LARGEST if self.bits == 3 else 1.0

    def pack(self, codes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pack codes [..., 8] int64, one a coordinate, to words [...] int32: coordinate j in bits 4j .. 4j + 3. Return them and the
        table of weights, or None if the words have the weights: bit j in bit 4j + 3.

        weights: [...] float32. In 8 bits they have 3 bits of mantissa, from 2^-14 to 1.875 * 2^LARGEST; others are clipped.
        """
        bit, table = torch.arange(SUB, device=codes.device), None
        if self.bits == 3:
            number = ((weights / self.unit).view(torch.int32) + 0x80000 >> 20) - 0x300
            codes = codes + ((number.clamp(0, 255)[..., None] >> bit & 1) << 3)
        else:
            table = weights.bfloat16()
        words = (codes << (4 * bit)).sum(dim=-1)  # 32 bits, unsigned, in int64
        return torch.where(words >= 1 << 31, words - (1 << 32), words).int(), table

    def directions(self, words: Tensor) -> Tensor:
        """Return directions v [..., 8] float32 of words [...]."""
        byte = torch.arange(256, device=words.device)
        last = (1 << self.bits) - 1
        pairs = self.levels[torch.stack([byte & last, byte >> 4 & last], dim=1)]  # one look-up for two nibbles
        found = pairs.index_select(0, words.contiguous().view(torch.uint8).flatten().int())
        return found.reshape(*words.shape, SUB)

    def weights(self, words: Tensor, table: Tensor | None) -> Tensor:
        """Return weights [...] float32 of words [...], from the table that `pack` returned with them."""
        if table is not None:
            return table.float()
        bit = torch.arange(SUB, device=words.device)
        number = ((words[..., None].long() >> (4 * bit + 3) & 1) << bit).sum(dim=-1)
        return (number + 0x300 << 20).int().view(torch.float32) * self.unit


@dataclass(slots=True)
class Summaries:
    """Preallocated summaries of all indexed keys. Positions count from the first indexed token.

    ids [L, H, B, capacity] uint8; codes [L, H, capacity, B] int32, coordinate j in bits 4j .. 4j + 3; weights [L, H, capacity,
    B] bfloat16, None if the codes have them; sizes [L, H, B, 256] int32: the number of keys with each id. L sequences, H KV
    heads, B subspaces.
    """

    ids: Tensor
    codes: Tensor
    weights: Tensor | None
    sizes: Tensor

    def contiguous(self) -> bool:
        """Whether all tables are."""
        return all(table is None or table.is_contiguous() for table in (self.ids, self.codes, self.weights, self.sizes))

    @property
    def capacity(self) -> int:
        return self.ids.shape[3]


@functools.cache
def lloyd_max(levels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the thresholds and centres of the optimal quantizer of X = |u_j|, u uniform on the unit sphere of R^8.

    X^2 ~ Beta(1/2, 7/2), so X has a density proportional to (1 - x^2)^(5/2) (appendix B.1.2), whose integrals have closed
    forms.
    """

    def mass(x: float) -> float:
        square = x * x
        return x * math.sqrt(1 - square) * (8 * square * square - 26 * square + 33) / 48 + 5 / 16 * math.asin(x)

    def moment(x: float) -> float:
        return -math.pow(1 - x * x, 3.5) / 7

    centres = [(i + 0.5) / levels for i in range(levels)]
    while True:
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(centres)), 1.0]
        new = [(moment(b) - moment(a)) / (mass(b) - mass(a)) for a, b in itertools.pairwise(edges)]
        if max(abs(a - b) for a, b in zip(centres, new, strict=True)) < 1e-13:
            return tuple(edges[1:-1]), tuple(new)
        centres = new


def make_quantizer(device: torch.device | str = "cpu", bits: int = 4) -> Quantizer:
    """Make the quantizer of 3 or 4 bits a coordinate on a device."""
    thresholds, centres = lloyd_max(1 << (bits - 1))
    whole = [round(128 * c - 0.5) for c in centres]
    values = [v + 0.5 for v in whole]
    signed = [*whole, *(~v for v in whole)][:8]
    low, high = (int.from_bytes(bytes(v & 255 for v in signed[i : i + 4]), "little", signed=True) for i in (0, 4))
    levels = torch.tensor([*values, *(-v for v in values)], dtype=torch.float32, device=device) / 128
    edges = torch.tensor(thresholds, dtype=torch.float32, device=device)
    low_slope, high_slope = max((i - 0.5) / v for i, v in enumerate(values)), min((i + 0.5) / v for i, v in enumerate(values))
    return Quantizer(bits, edges, levels, (low, high), (thresholds, tuple(values)), (low_slope + high_slope) / 2)


def definition(keys: Tensor, rotation: Rotation, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summarise keys [..., n, d]: ids [..., B, n] uint8, codes [..., n, B] int32, weights [..., n, B] bfloat16 or None.

    The weight of a zero key is 0, or the least where codes have the weights.
    """
    y = srht(keys, rotation)
    y = y.reshape(*y.shape[:-1], -1, SUB)
    bit = torch.arange(SUB, device=y.device)
    ids = ((y >= 0).long() << bit).sum(dim=-1).to(torch.uint8)
    radius = y.square().sum(dim=-1).sqrt()
    size = y.abs() / torch.where(radius > 0, radius, 1.0)[..., None]
    bins = torch.bucketize(size, quantizer.thresholds, right=True)
    align = (quantizer.levels[bins] * size).sum(dim=-1)
    weights = torch.where(radius > 0, radius / torch.where(align > 0, align, 1.0), 0.0)
    return ids.transpose(-1, -2), *quantizer.pack(bins + ((y < 0).long() << (quantizer.bits - 1)), weights)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.srht import rotate_tile

    @triton.jit
    def _above(x, slope, edge, NATIVE: tl.constexpr):
        # 1 where x * slope is larger than edge, else 0; in between where it is by less than 1.
        if NATIVE:
            code: tl.constexpr = "fma.rn.sat.f32 $0, $1, $2, $3;"
            found = tl.inline_asm_elementwise(code, "=f,f,f,f", [x, slope, -edge], dtype=tl.float32, is_pure=True, pack=1)
        else:
            found = (x * slope > edge).to(tl.float32)
        return found

    @triton.jit(do_not_specialize=["rows", "n", "loops"])  # else new values may compile another kernel in mid-decoding
    def _encode(keys, centre, basis, ids, codes, weights, numbers, rows, n, heads, capacity, scale, stride_r, stride_h, stride_n,
                dim, loops, EDGES: tl.constexpr, LEVELS: tl.constexpr, SLOPE: tl.constexpr, SHARP: tl.constexpr, BITS: tl.constexpr,
                SUBS: tl.constexpr,
                SQUARE: tl.constexpr, BLOCK: tl.constexpr, CENTRE: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
                NATIVE: tl.constexpr):  # fmt: skip
        # Program: `loops` blocks of BLOCK keys of one head and sequence of a layer, so that it loads the basis once.
        # numbers: the sequences, the begin of their keys, and for each layer the offset of its tables from the first
        # layer's.
        h = tl.program_id(1)
        r = tl.program_id(2)
        pair = tl.load(numbers + r % rows) * heads + h
        start = tl.load(numbers + rows + r % rows)
        layer = numbers + 2 * rows + 4 * (r // rows)
        ids += tl.multiple_of(tl.load(layer), 16)
        codes += tl.multiple_of(tl.load(layer + 1), 16)
        if BITS == 4:
            weights += tl.multiple_of(tl.load(layer + 2), 16)
        source = keys + r.to(tl.int64) * stride_r + h.to(tl.int64) * stride_h
        i = tl.arange(0, SQUARE)
        b = tl.arange(0, SQUARE // 8)
        j = tl.arange(0, 8)[None, None, :]
        # A thread of the product holds columns 2 q and 2 q + 1 of every 8: 8 of 32 columns, which this order makes the
        # coordinates of one subspace.
        column = i // 32 * 32 + i % 8 // 2 * 8 + i % 32 // 8 * 2 + i % 2 if SQUARE >= 32 else i
        matrix = tl.load(basis + i[:, None] * SQUARE + column[None, :])
        matrix = matrix.to(tl.float32).to(tl.bfloat16 if keys.dtype.element_ty == tl.float32 else keys.dtype.element_ty)
        if CENTRE:
            middle = tl.load(centre + tl.load(layer + 3) + pair * dim + i, mask=i < dim, other=0.0)[None, :]
        begin = tl.program_id(0) * loops * BLOCK
        for first in tl.range(begin, tl.minimum(begin + loops * BLOCK, n), BLOCK, num_stages=STAGES):
            token = first + tl.arange(0, BLOCK)
            inside = (token < n)[:, None]
            at = source + token.to(tl.int64)[:, None] * stride_n + i[None, :]
            x = tl.load(at, mask=inside & (i < dim)[None, :], other=0)
            if CENTRE:
                x = (x.to(tl.float32) - middle).to(keys.dtype.element_ty)
            y = rotate_tile(x, matrix, UPCAST)
            if SQUARE >= 32:
                y = tl.permute(tl.reshape(y, (BLOCK, SQUARE // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
            y = tl.reshape(y, (BLOCK, SQUARE // 8, 8))  # unscaled: only the weight needs the scale
            square = tl.sum(y * y, axis=2)
            slope = SHARP * tl.rsqrt(tl.maximum(square, 1e-30))
            size = tl.abs(y)
            level = tl.full((BLOCK, SQUARE // 8, 8), LEVELS[0], tl.float32)
            for t in tl.static_range(len(EDGES)):
                level += _above(size, slope[:, :, None], EDGES[t] * SHARP, NATIVE) * (LEVELS[t + 1] - LEVELS[t])
            align = tl.sum(level * size, axis=2)
            # 1.5 * 2^23 more, a number's lowest bits are its integer: the level's, and the highest for a negative sign.
            nibble = (level * SLOPE + 12582912.0) + 2.0 ** (BITS - 1) * _above(y, -SHARP, 0.0, NATIVE)
            word = tl.sum(nibble.to(tl.int32, bitcast=True) << (4 * j), axis=2) - 0x3F400000  # what its bits are else
            pattern = (~word >> (BITS - 1)) & 0x11111111  # the signs, one per nibble, compacted into a byte
            pattern = (pattern | (pattern >> 3)) & 0x03030303
            pattern = (pattern | (pattern >> 6)) & 0x000F000F
            pattern = (pattern | (pattern >> 12)) & 0xFF
            weight = tl.where(square > 0, scale * square / tl.where(align > 0, align, 1.0), 0.0)
            place = (start + token).to(tl.int64)
            kept = inside & (b < SUBS)[None, :]
            tl.store(ids + (pair * SUBS + b)[None, :] * capacity + place[:, None], pattern.to(tl.uint8), mask=kept)
            at = (pair * capacity + place)[:, None] * SUBS + b[None, :]
            if BITS == 4:
                tl.store(weights + at, weight.to(tl.bfloat16), mask=kept)
            else:  # as Quantizer.pack: rounded to 8 bits, which move to the tops of the nibbles
                number = ((weight.to(tl.int32, bitcast=True) + 0x80000) >> 20) - 0x300
                number = tl.minimum(tl.maximum(number, 0), 255)
                number = (number | (number << 12)) & 0x000F000F
                number = (number | (number << 6)) & 0x03030303
                word |= ((number | (number << 3)) & 0x11111111) << 3
            tl.store(codes + at, word, mask=kept)

    @triton.jit(do_not_specialize=["sign"])
    def _count(ids, sizes, spans, heads, capacity, sign, SUBS: tl.constexpr, BLOCK: tl.constexpr):
        # Program: the ids of BLOCK keys in one subspace.
        r, rows = tl.program_id(2), tl.num_programs(2)
        row = (tl.load(spans + r) * heads * SUBS + tl.program_id(1)).to(tl.int64)
        start = tl.load(spans + rows + r)
        stop = tl.load(spans + 2 * rows + r)
        place = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if start + tl.program_id(0) * BLOCK < stop:
            known = place < stop
            id = tl.load(ids + row * capacity + place, mask=known, other=0).to(tl.int32)
            counts = tl.histogram(id, 256, mask=known)
            tl.atomic_add(sizes + row * 256 + tl.arange(0, 256), counts * sign, mask=counts > 0, sem="relaxed")


def _to_device(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy lists of equal length to the device as [.., n] int32, without waiting for queued work.

    A kernel takes the whole tensor: whether its second row is 16-byte aligned depends on n, and would specialize the kernel.
    """
    return torch.tensor([list(some) for some in numbers], dtype=torch.int32).to(device, non_blocking=True)


def _between(own: Tensor | None, its: Tensor | None) -> int:
    """Return how many elements a tensor begins after another of its dtype; 0 for None."""
    return 0 if own is None or its is None else (own.data_ptr() - its.data_ptr()) // own.element_size()


def launch(keys: Tensor, rotation: Rotation, quantizer: Quantizer, layers: Sequence[Summaries], seqs: Sequence[int],
           starts: Sequence[int], centres: Sequence[Tensor] = ()) -> None:  # fmt: skip
    """Launch the kernel on any device; arguments as in `encode`."""
    many, heads, n, dim = keys.shape
    first, apart = layers[0], list[int]()
    for into, centre in zip_longest(layers, centres):
        assert into.contiguous() and into.codes.dtype == torch.int32 and into.ids.shape == first.ids.shape
        pairs = (
            (into.ids, first.ids),
            (into.codes, first.codes),
            (into.weights, first.weights),
            (centre, next(iter(centres), None)),
        )
        apart += [_between(own, its) for own, its in pairs]
    assert keys.stride(3) == 1 and many == len(layers) * len(seqs) and max(starts) + n <= first.capacity
    wide, (edges, levels) = rotation.padded > 128, quantizer.constants
    loops = max(1, min(LOOPS, n * heads * many // (BLOCK * PROGRAMS)))
    numbers = torch.tensor([*seqs, *starts, *apart]).to(keys.device, non_blocking=True)
    _encode[(triton.cdiv(n, BLOCK * loops), heads, many)](
        keys, centres[0] if centres else None, rotation.basis, first.ids, first.codes, first.weights, numbers, len(seqs), n, heads,
        first.capacity, 128 * rotation.scale / quantizer.unit, keys.stride(0), keys.stride(1), keys.stride(2), dim, loops,
        EDGES=edges, LEVELS=levels, SLOPE=quantizer.slope, SHARP=SHARP, BITS=quantizer.bits, SUBS=rotation.padded // SUB,
        SQUARE=rotation.basis.shape[0], BLOCK=BLOCK, CENTRE=bool(centres), UPCAST=keys.device.type == "cpu",
        STAGES=1 if wide else STAGES, NATIVE=nvidia(keys.device), num_warps=2 * WARPS if wide else WARPS,
    )  # fmt: skip


def launch_count(into: Summaries, seqs: Sequence[int], starts: Sequence[int], stops: Sequence[int], sign: int = 1) -> None:
    """Launch the counting kernel on any device; arguments as in `count`."""
    heads, subs = into.ids.shape[1:3]
    longest = max(stop - start for start, stop in zip(starts, stops, strict=True))
    spans = _to_device([seqs, starts, stops], into.ids.device)
    _count[(triton.cdiv(longest, 4096), heads * subs, len(seqs))](
        into.ids, into.sizes, spans, heads, into.capacity, sign, SUBS=subs, BLOCK=4096
    )  # fmt: skip


def encode(keys: Tensor, rotation: Rotation, quantizer: Quantizer, layers: Sequence[Summaries], seqs: Sequence[int],
           starts: Sequence[int], centres: Sequence[Tensor] = ()) -> None:  # fmt: skip
    """Summarise keys [N R, H, n, d] of N layers, one layer's after the other's: of each, keys[i] become positions starts[i] ..
    starts[i] + n of sequence seqs[i].

    Writes ids, codes and weights of the layers' summaries, which have equal shapes, but not sizes. centres [L, H, d]
    float32: of each layer, subtracted from a sequence's keys first, in their dtype.
    """
    n = keys.shape[2]
    if n == 0:
        return
    if keys.is_cuda and HAS_TRITON:
        launch(keys if keys.stride(3) == 1 else keys.contiguous(), rotation, quantizer, layers, seqs, starts, centres)
        return
    for i, (own, seq, start) in enumerate(
        (own, *span) for own in range(len(layers)) for span in zip(seqs, starts, strict=True)
    ):
        into = layers[own]
        shifted = keys[i] - centres[own][seq, :, None].to(keys.dtype) if centres else keys[i]
        ids, codes, weights = definition(shifted, rotation, quantizer)
        into.ids[seq, :, :, start : start + n] = ids
        into.codes[seq, :, start : start + n] = codes
        if into.weights is not None and weights is not None:
            into.weights[seq, :, start : start + n] = weights


def count(into: Summaries, seqs: Sequence[int], starts: Sequence[int], stops: Sequence[int], sign: int = 1) -> None:
    """Add (sign 1) or subtract (sign -1) the ids at positions starts[i] .. stops[i] of sequence seqs[i] in the cluster sizes."""
    if all(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    if into.ids.is_cuda and HAS_TRITON:
        launch_count(into, seqs, starts, stops, sign)
        return
    for seq, start, stop in zip(seqs, starts, stops, strict=True):
        ids = into.ids[seq, :, :, start:stop].long()
        into.sizes[seq].scatter_add_(2, ids, torch.full_like(ids, sign, dtype=torch.int32))
