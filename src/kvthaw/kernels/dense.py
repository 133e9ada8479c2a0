"""Dense attention over contiguous keys, with its log-sum-exp, so that results over several runs of keys can be merged.

`definition` is the plain formula; `attend` computes the same with the fastest torch operator that supports its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import flash_attention_4, packed
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.merge import PARTS, merge_parts

BLOCK = 16384
"""Earlier keys that many new tokens attend to at once: a constant limits the number of shapes and the memory of a long past."""
RUN = 32768
"""Earlier keys that BLOCK new tokens or more attend to at once: in longer runs there is less to merge, and more to plan."""
LONG = 131072
"""Earlier keys that fewer than BLOCK new tokens attend to at once: launches, not operations, are what more parts would cost."""
_PLANNED = (8192, 4096, 2048)  # fewer keys than BLOCK that are worth a plan of cuDNN's
_SCORES = 1 << 24  # float32 scores that the fallback path holds at once
QUERIES = 512
"""Queries that go under one mask at once."""


def definition(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale q.k) v in float32. query [B, Hq, T, D]; keys, values [B, H, n, D], Hq a multiple of H.

    causal: query i attends to keys j <= n - T + i. softcap c: scores become c tanh(score / c). Returns (out [B, Hq, T, D]
    float32, lse [B, Hq, T] float32, natural log); 0 and -inf without a visible key.
    """
    batch, q_heads, steps, dim = query.shape
    heads, n = keys.shape[1], keys.shape[2]
    grouped = query.float().reshape(batch, heads, -1, steps, dim)
    scores = torch.einsum("bhgtd,bhnd->bhgtn", grouped, keys.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        hidden = torch.ones(steps, n, dtype=torch.bool, device=query.device).triu(n - steps + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    out = torch.einsum("bhgtn,bhnd->bhgtd", weights, values.float())
    return out.reshape(batch, q_heads, steps, -1), lse.reshape(batch, q_heads, steps)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    flash4: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `definition` with out in the dtype of query, by flash attention where torch supports the arguments.

    flash4: use FlashAttention 4, which must be installed, where it supports the arguments.
    """
    heads, n, steps = keys.shape[1], keys.shape[2], query.shape[2]
    if flash4 and min(steps, n) > 0 and (steps <= n or not causal) and flash_attention_4.serves(query, n):
        return flash_attention_4.attend(query, keys, values, scale=scale, causal=causal, softcap=softcap)
    group = query.shape[1] // heads
    if softcap is None and n and (not causal or n == steps) and _flash(query):
        if causal:  # a group's query heads cannot share a row of scores under a causal mask
            spread = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (keys, values))
            return _flash_attend(query, *spread, scale=scale, causal=True)
        folded = query.reshape(query.shape[0], heads, group * steps, -1)
        out, lse = _flash_attend(folded, keys, values, scale=scale, causal=False)
        return out.reshape(query.shape), lse.reshape(query.shape[:3])
    block = max(1, _SCORES // max(1, query.shape[0] * query.shape[1] * n))
    parts = []
    for start in range(0, steps, block):
        stop = min(steps, start + block)
        visible = n - steps + stop if causal else n
        part = query[:, :, start:stop], keys[:, :, :visible], values[:, :, :visible]
        parts.append(definition(*part, scale=scale, causal=causal, softcap=softcap))
    return torch.cat([p[0] for p in parts], dim=2).to(query.dtype), torch.cat([p[1] for p in parts], dim=2)


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    flash4: bool = False,
) -> Tensor:
    """Compute causal attention of the last T of n tokens, [B, Hq, T, D] in the dtype of query.

    sinks [Hq]: learned attention-sink logits, which take softmax weight and contribute no value (gpt-oss).
    flash4: see attend().
    """
    steps, n = query.shape[2], keys.shape[2]
    if flash4 and steps > 1 and flash_attention_4.serves(query, n):
        out, lse = attend(query, keys, values, scale=scale, causal=True, softcap=softcap, flash4=True)
        return with_sinks(out, lse, sinks).to(query.dtype)
    planned = not query.is_cuda or not _flash(query) or steps == 1 or worth_a_plan(steps, n)  # see _cudnn
    if softcap is None and sinks is None and (steps == n or steps == 1) and planned:
        if steps == 1:  # the query heads of a group become queries of their KV head
            folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
            return F.scaled_dot_product_attention(folded, keys, values, scale=scale).reshape(query.shape)
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, is_causal=True, enable_gqa=True)
    if steps < n:
        sizes = runs(n - steps, RUN if steps >= BLOCK else LONG)
        past = zip(*(t[:, :, : n - steps].split(sizes, dim=2) for t in (keys, values)), strict=True)
        new = keys[:, :, n - steps :], values[:, :, n - steps :]
        return continued(query, *new, past, scale=scale, softcap=softcap, sinks=sinks)
    out, lse = attend(query, keys, values, scale=scale, causal=True, softcap=softcap)
    return with_sinks(out, lse, sinks).to(query.dtype)


def packed_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    ends: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    flash4: bool = False,
) -> Tensor:
    """Compute causal attention of several prompts, one after the other in one row, each to itself alone.

    query: [1, Hq, T, D].
    keys, values: [1, H, T, D].
    lengths: tokens of each prompt, T in all.
    ends: 0, and the sums of the first lengths, [prompts + 1] int32 on the device.
    flash4: see attend(). Only for what the kernel of kvthaw.kernels.packed does not take.

    Returns [1, Hq, T, D] in the dtype of query.
    """
    if packed.serves(query):
        return packed.launch(query, keys, values, lengths, ends, scale=scale, softcap=softcap, sinks=sinks)
    parts = zip(*(x.split(list(lengths), dim=2) for x in (query, keys, values)), strict=True)
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "flash4": flash4}
    return torch.cat([causal_attention(*part, **how) for part in parts], dim=2)


def continued(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    past: Iterable[tuple[Tensor, Tensor]],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    flash4: bool = False,
) -> Tensor:
    """Attend with T new tokens causally to their own keys and values, and fully to all of `past`.

    query: [B, Hq, T, D].
    keys, values: [B, H, T, D].

    past: yields keys and values [B, H, n, D] part by part. Each part is consumed before the next is requested. The first is
        requested after the causal part is done.

    flash4: see attend().

    At most PARTS parts are held, so device memory does not depend on their number.
    """
    query = query.contiguous()  # once, not for every part
    parts = [attend(query, keys, values, scale=scale, causal=True, softcap=softcap, flash4=flash4)]
    for part in past:
        if len(parts) == PARTS:
            parts = [merge_parts(parts, torch.float32)]
        parts.append(attend(query, *part, scale=scale, causal=False, softcap=softcap, flash4=flash4))
    out, lse = merge_parts(parts, query.dtype if sinks is None else torch.float32)
    return with_sinks(out, lse, sinks).to(query.dtype)


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by any bool mask [B, 1, T, n]. Returns [B, Hq, T, D] in the dtype of query, 0 where a query sees nothing.

    Queries go in blocks. Each block reads only the keys between the first and the last that it sees, so memory does not
    grow with T * n.
    """
    if query.shape[2] > QUERIES:
        masks = mask.split(QUERIES, dim=2)
        seen = torch.stack([block.any(dim=2).any(dim=0)[0] for block in masks]).int()  # [blocks, n]
        bounds = torch.stack((seen.argmax(1), mask.shape[3] - seen.flip(1).argmax(1)), dim=1).tolist()  # the one wait
        outs = [
            masked_attention(
                part, keys[:, :, a:b], values[:, :, a:b], block[..., a:b], scale=scale, softcap=softcap, sinks=sinks
            )
            for part, block, (a, b) in zip(query.split(QUERIES, dim=2), masks, bounds, strict=True)
        ]
        return torch.cat(outs, dim=2)
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return out.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    scores = query.float() @ keys.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return with_sinks(weights @ values.float(), lse, sinks).to(query.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Apply sinks [Hq] to attention [B, Hq, T, D] with lse [B, Hq, T]."""
    if sinks is None:
        return out
    share = torch.sigmoid(lse - sinks.float().to(lse.device)[None, :, None])
    return out.float() * share[..., None]


def runs(keys: int, most: int) -> list[int]:
    """Split earlier keys into runs of `most`, one of a multiple of BLOCK, powers of two, and a last one too short for a plan: few
    lengths occur."""
    found, left = [most] * (keys // most), keys % most
    for size in (left // BLOCK * BLOCK, *_PLANNED):
        if 0 < size <= left:
            found.append(size)
            left -= size
    return [*found, left] if left else found


def worth_a_plan(queries: int, keys: int) -> bool:
    """Return whether cuDNN should plan attention of `queries` queries to `keys` keys.

    It should where flash attention would take longer than making the plan. It also should for pairs that recur. There
    `keys` is a length from runs(), and `queries` is a multiple of 512 and a power of two times less than 64. The
    scheduler's chunks have such lengths in each KV head.
    """
    run = keys in _PLANNED or (0 < keys <= LONG and keys % BLOCK == 0)
    again = run and queries % 512 == 0 and (queries & -queries) * 64 > queries
    return again or min(queries, keys) >= BLOCK


def plan(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> None:
    """Make cuDNN's plan for attention of these queries, if cuDNN would be used: later calls of this thread need not wait for it.

    causal: plan the attention of T queries to their own T keys, else to all of `keys`.
    """
    folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    asked = (query, query, query) if causal else (folded, keys, values)
    if _flash(query) and _cudnn(*asked, causal):
        attend(query.contiguous(), keys, values, scale=1.0, causal=causal)
        if causal:
            causal_attention(query, keys, values, scale=1.0)


def _flash(query: Tensor) -> bool:
    """Return whether torch has an attention for such queries that also returns the log-sum-exp."""
    if query.device.type == "cpu":
        return query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    dims = query.shape[-1]
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and dims % 8 == 0 and dims <= 256


def _flash_attend(query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, causal, scale=scale)
    elif _cudnn(query, keys, values, causal):
        out, lse = aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, causal, scale=scale)[:2]
    return out, lse.reshape(out.shape[:3]).float()


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> bool:
    """Return whether to use cuDNN attention, as scaled_dot_product_attention does from Hopper on.

    cuDNN is 1.5 times as fast there, but makes a plan for each pair of lengths, which takes about 40 ms; see worth_a_plan.
    """
    if not nvidia(query.device, (9, 0)) or not worth_a_plan(query.shape[2], keys.shape[2]):
        return False
    cuda = torch.backends.cuda
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(query, keys, values, None, 0.0, causal, False))
