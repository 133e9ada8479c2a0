"""Parts of softmax denominators, as kernels that score leave them: a maximum, and the sum of exp(score - maximum)."""

from __future__ import annotations

from kvthaw.kernels import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def from_top(top):
        # What to subtract before exp: the maximum, or 0 where there is nothing.
        return tl.where(top == float("-inf"), 0.0, top)

    @triton.jit
    def leave_block(part, scores, size, mask, GC: tl.constexpr):
        # Of scores [units, heads], each of which counts `size` times: the maximum of each head to part, the sum GC behind it.
        top = tl.max(scores, axis=0)
        total = tl.sum(tl.exp(scores - from_top(top)[None, :]) * size.to(tl.float32)[:, None], axis=0)
        tl.store(part, top, mask=mask)
        tl.store(part + GC, total, mask=mask)

    @triton.jit
    def take(top, mass, logit):
        # Maximum and sum of each place after one more logit there.
        new = tl.maximum(top, logit)
        safe = from_top(new)
        return new, mass * tl.exp(top - safe) + tl.exp(logit - safe)

    @triton.jit
    def leave(part, top, mass, mask):
        # The maxima and sums [places, heads] of each head as one, to part and the place behind it.
        whole = tl.max(top, axis=0)
        tl.store(part, whole, mask=mask)
        tl.store(part + 1, tl.sum(mass * tl.exp(top - from_top(whole)[None, :]), axis=0), mask=mask)
