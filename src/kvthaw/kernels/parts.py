"""Partial softmax denominators that scoring kernels store: a maximum, and the sum of exp(score - maximum)."""

from __future__ import annotations

from kvthaw.kernels import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def finite_top(top):
        # Return the maximum to subtract before exp, or 0 where it is -inf.
        return tl.where(top == float("-inf"), 0.0, top)

    @triton.jit
    def store_block_part(part, scores, size, mask, GC: tl.constexpr):
        # Store each head's maximum of scores [units, heads] at part, and its sum of size exp(score - maximum) GC elements after
        # it.
        top = tl.max(scores, axis=0)
        total = tl.sum(tl.exp(scores - finite_top(top)[None, :]) * size.to(tl.float32)[:, None], axis=0)
        tl.store(part, top, mask=mask)
        tl.store(part + GC, total, mask=mask)

    @triton.jit
    def accumulate(top, mass, logit):
        # Update the running maximum and sum of each element with one more logit.
        new = tl.maximum(top, logit)
        safe = finite_top(new)
        return new, mass * tl.exp(top - safe) + tl.exp(logit - safe)

    @triton.jit
    def store_part(part, top, mass, mask):
        # Reduce the maxima and sums [elements, heads] over elements; store each head's at part and part + 1.
        whole = tl.max(top, axis=0)
        tl.store(part, whole, mask=mask)
        tl.store(part + 1, tl.sum(mass * tl.exp(top - finite_top(whole)[None, :]), axis=0), mask=mask)
