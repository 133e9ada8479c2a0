"""Flash-decoding for one decode step in one launch.

The kernel writes the newest key and value to their slot, and every query head attends to the visible keys of its sequence. The
keys are split among programs; the last program of a KV head to finish merges the splits. Shapes are static, lengths are read on
the device, and the host never syncs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep, InSlab, Places
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.in_place import Every, InPlace, Selected
from kvthaw.kernels.merge import Partial, merge
from kvthaw.kernels.split import multiprocessors, shared_memory, split_for, stages_for, triton_block


def definition(step: DecodeStep, places: Places) -> Partial:
    """Compute softmax attention over the visible keys in float32. lse includes sinks and partials. A head without visible keys
    returns 0 with lse -inf. Rows that are read in place must be copied first, as InPlace.copied does."""
    places.write(step.keys, step.values)
    query, seen, keys, values = step.query, places.seen(step.keys), step.keys.float(), step.values.float()
    scores = torch.einsum("bhgd,bhnd->bhgn", query.float().unflatten(1, (keys.shape[1], -1)), keys) * step.scale
    if step.softcap is not None:
        scores = step.softcap * torch.tanh(scores / step.softcap)
    if step.log_weight is not None:
        scores = scores + step.log_weight.reshape(scores.shape)
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    out = torch.einsum("bhgn,bhnd->bhgd", weights, torch.where(seen[..., None], values, 0.0))
    parts = [Partial(out.reshape(query.shape), lse.reshape(query.shape[:2])), *step.partials]
    if step.sinks is not None:
        parts.append(Partial(torch.zeros_like(parts[0].out), step.sinks.float().expand(query.shape[:2])))
    return parts[0] if len(parts) == 1 else Partial(*merge([p.out for p in parts], [p.lse for p in parts]))


if TYPE_CHECKING:
    _attend: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.in_place import addresses, picks
    from kvthaw.kernels.row_format import load_codes
    from kvthaw.kernels.split import LOG2E, merge_splits, own_range

    @triton.jit
    def _capped(score, scale, softcap):
        # Scale and softcap scores; return base-2 logits.
        if softcap is not None:
            score = score * (scale / softcap)
            score = (2.0 * tl.sigmoid(2.0 * score) - 1.0) * (softcap * LOG2E)
        else:
            score = score * (scale * LOG2E)
        return score

    @triton.jit
    def _decoded(x, rows, apart, d, PART: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
        # Load K (PART 0) or V (1) of rows of 8 bits [N, d] where apart [N], else take x, None for zeros. Returns numbers of
        # dtype KIND and the scale of each row [N], float32. The scale is a power of two, so it may multiply products or
        # weights instead.
        numbers, scale = load_codes(rows, apart, d, PART, DIM, KIND, NATIVE)
        if tl.float16 == KIND:  # whose range scores and values share, but weights times scales would not
            numbers, scale = (numbers.to(tl.float32) * scale[:, None]).to(KIND), tl.where(apart, 1.0, 1.0)
        if x is not None:
            numbers, scale = tl.where(apart[:, None], numbers, x), tl.where(apart, scale, 1.0)
        return numbers, scale

    @triton.jit
    def _attend(
        query, keys, values, new_key, new_value, visible, picked, slots, table, counts, totals, lengths, starts, log_weight,
        sinks, more_out, more_lse, acc_parts, lse_parts, tickets, out, q_seq, q_head, k_seq, k_head, k_row, v_seq, v_head, v_row,
        nk_seq, nk_head, nv_seq, nv_head, m_seq, m_head, m_row, w_seq, w_head, t_seq, n, sink, ring, row_bytes, stored_bytes,
        block_size, scale, softcap, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, MERGE_G: tl.constexpr, MERGE_S: tl.constexpr,
        CHUNK: tl.constexpr, ONE: tl.constexpr, ALIGN: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
        PHASES: tl.constexpr, EACH: tl.constexpr,
    ):  # fmt: skip
        # Program (sequence and KV head, split): the query heads of one KV head over one range of its keys. All ranges of a
        # sequence have the same number of whole blocks. A program without keys stores lse -inf and leaves its acc unwritten.
        # If EACH is not 0, a sequence has a program for every EACH tokens, and its other programs do nothing.
        # The newest token is read from new_key and new_value, never from its slot. With several blocks per program it
        # initializes the softmax of split 0, which also stores it to its slot; with one block (ONE) it replaces what the block
        # loaded from that slot. In two PHASES each program has a range of sink and ring, and one of rows that all lie in blocks:
        # each has its own kind of loads.
        pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        b, h = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
        start, length = 0, n
        if starts is not None:
            start = tl.load(starts + b)
        if lengths is not None:
            length = tl.load(lengths + b)
        past = length  # tokens that are in memory
        if new_key is not None:
            past = length - 1
        if ring is None:
            first, last, behind = tl.maximum(start, 0), tl.minimum(length if ONE else past, n), 0
            place_new = past
        else:  # a slab: sink, ring, then the slots that `visible` covers
            first, last, behind = 0, n, sink + ring
            oldest = (start - sink) % ring  # ring slot of position `start`
            place_new = tl.where(past < sink, past, sink + (past - sink) % ring)
        if PHASES == 2:
            last = behind
        used = splits
        if EACH:
            used = tl.minimum(splits, tl.maximum((length + EACH // 2) // EACH, 1))
            if split >= used:
                return
        begin, end = own_range(first, last, split, used, BLOCK_N)

        # Numbers of 8 bits become float16, which has all of them, by one instruction; bfloat16 takes four.
        EIGHT: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
        WIDE: tl.constexpr = query.dtype.element_ty.primitive_bitwidth == 32
        KIND: tl.constexpr = (tl.float32 if WIDE else tl.float16) if EIGHT else keys.dtype.element_ty
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        offset = tl.arange(0, BLOCK_N)
        is_head, is_dim = g < GROUP, d < DIM
        heads = h * GROUP + g
        keys += b * k_seq + h * k_head
        values += b * v_seq + h * v_head
        if new_key is not None:
            new_key += b * nk_seq + h * nk_head + d
            new_value += b * nv_seq + h * nv_head + d
            mine = (place_new >= 0) & (place_new < n)
            home = place_new.to(tl.int64)
        if visible is not None:  # loaded one block ahead, so that no block waits for it
            visible += b * m_seq + h * m_head
            near = begin + offset
            ahead = tl.load(visible + (near - behind).to(tl.int64) * m_row, mask=(near >= behind) & (near < end), other=0)
        if table is not None:  # so are the addresses of the rows: those picked, or all from the sink to the ring
            every = n
            if picked is not None:
                picked += pair.to(tl.int64) * (n - behind)
            else:
                every = tl.minimum(n, behind + tl.maximum(tl.minimum(start, length) - sink, 0))  # none of a paused sequence
            POOLED: tl.constexpr = slots is not None
            if POOLED:
                slots += pair.to(tl.int64) * (n - behind)
            table += b * t_seq
            head_bytes = block_size * stored_bytes
            if PHASES == 1:
                pick, slot = picks(picked, slots, begin + offset, tl.minimum(end, every), behind, sink)
                lie, apart = addresses(
                    keys, pick, slot, table, begin + offset, behind, h, row_bytes, stored_bytes, block_size, head_bytes, POOLED
                )
                if not ONE:  # loaded two blocks ahead, so that looking for an address waits for nothing
                    pick, slot = picks(picked, slots, begin + BLOCK_N + offset, end, behind, sink)
            if totals is not None:
                chosen = tl.load(counts + pair, mask=split == 0, other=0).to(tl.int64)
                tl.atomic_add(totals, chosen, mask=split == 0, sem="relaxed")
                tl.atomic_max(totals + 2, chosen, mask=split == 0, sem="relaxed")
                tl.atomic_add(totals + 3, chosen, mask=split == 0, sem="relaxed")
        if ONE:  # issue all loads before waiting for any
            place = begin + offset
            if table is not None:
                at_keys = tl.multiple_of(lie.to(keys.dtype), ALIGN)[:, None] + d[None, :]
                at_values = at_keys + DIM
                both = ((place < end) & (lie != 0))[:, None] & is_dim[None, :]
                if FP8:
                    both = both & (apart == 0)[:, None]
            else:
                row = place.to(tl.int64)[:, None]
                at_keys, at_values = keys + row * k_row + d[None, :], values + row * v_row + d[None, :]
                both = (place < end)[:, None] & is_dim[None, :]
            v = tl.load(at_values, mask=both, other=0.0).to(KIND)
            if FP8:
                v, v_scale = _decoded(v, lie, apart, d, 1, DIM, KIND, NATIVE)
            if new_key is not None:
                nk = tl.load(new_key, mask=is_dim, other=0.0).to(keys.dtype.element_ty).to(KIND)
                nv = tl.load(new_value, mask=is_dim, other=0.0).to(values.dtype.element_ty).to(KIND)
        q = tl.load(
            query + b * q_seq + heads[:, None] * q_head + d[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0
        )
        if ONE:
            k = tl.load(at_keys, mask=both, other=0.0).to(KIND)
            if FP8:
                k, k_scale = _decoded(k, lie, apart, d, 0, DIM, KIND, NATIVE)
        q = q.to(tl.float32) if UPCAST else q.to(KIND)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)  # reduced over BLOCK_N only at the end
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        if new_key is not None:
            if ONE:
                mine = mine & (place_new >= begin) & (place_new < end)
                is_new = (place == place_new) & mine
                k = tl.where(is_new[:, None], nk[None, :], k)
                v = tl.where(is_new[:, None], nv[None, :], v)
            else:
                mine = mine & (split == 0)
                nk = tl.load(new_key, mask=is_dim & mine, other=0.0).to(keys.dtype.element_ty).to(KIND)
                nv = tl.load(new_value, mask=is_dim & mine, other=0.0).to(values.dtype.element_ty).to(KIND)
                alone = _capped(tl.sum(q.to(tl.float32) * nk.to(tl.float32)[None, :], 1), scale, softcap)
                if log_weight is not None:
                    weighed = log_weight + b * w_seq + heads * w_head + place_new
                    alone += tl.load(weighed, mask=is_head & mine, other=0.0) * LOG2E
                top = tl.where(mine, alone, float("-inf"))
                some = top > float("-inf")
                sums = tl.where(some[:, None] & (offset == 0)[None, :], 1.0, sums)
                acc = tl.where(some[:, None], nv.to(tl.float32)[None, :], acc)
            finite = (tl.abs(nk.to(tl.float32)) < float("inf")) & (tl.abs(nv.to(tl.float32)) < float("inf"))
            tl.store(tickets + b * (HEADS + 1) + d * 0, 1, mask=is_dim & mine & (finite == 0))
            tl.store(keys + home * k_row + d, nk, mask=is_dim & mine)
            tl.store(values + home * v_row + d, nv, mask=is_dim & mine)
        for phase in tl.static_range(PHASES):
            # In phase 0 some rows lie in the slab; in the last phase, if there are picked ones, where `addresses` says.
            if phase == 1:
                begin, end = own_range(behind, every, split, used, BLOCK_N)
                pick, slot = picks(picked, slots, begin + offset, end, behind, sink)
                lie, apart = addresses(
                    keys, pick, slot, table, begin + offset, behind, h, row_bytes, stored_bytes, block_size, head_bytes, POOLED
                )
                pick, slot = picks(picked, slots, begin + BLOCK_N + offset, end, behind, sink)
            for at in range(begin, end, BLOCK_N):
                place = at + offset
                inside = place < end
                if not ONE:
                    if table is not None and phase == PHASES - 1:
                        at_keys = tl.multiple_of(lie.to(keys.dtype), ALIGN)[:, None] + d[None, :]
                        at_values = at_keys + DIM
                        both = (inside & (lie != 0))[:, None] & is_dim[None, :]
                        if FP8:
                            both = both & (apart == 0)[:, None]
                    else:
                        row = place.to(tl.int64)[:, None]
                        at_keys, at_values = keys + row * k_row + d[None, :], values + row * v_row + d[None, :]
                        both = inside[:, None] & is_dim[None, :]
                    k, v = None, None
                    if phase == 0 or not FP8:
                        k = tl.load(at_keys, mask=both, other=0.0).to(KIND)
                        v = tl.load(at_values, mask=both, other=0.0).to(KIND)
                    if FP8 and phase == PHASES - 1:
                        k, k_scale = _decoded(k, lie, apart, d, 0, DIM, KIND, NATIVE)
                        v, v_scale = _decoded(v, lie, apart, d, 1, DIM, KIND, NATIVE)
                seen = inside
                if table is not None and phase == PHASES - 1:
                    seen = (place >= behind) & (lie != 0)
                    if not ONE:
                        lie, apart = addresses(
                            keys, pick, slot, table, place + BLOCK_N, behind, h, row_bytes, stored_bytes, block_size, head_bytes,
                            POOLED,
                        )  # fmt: skip
                        pick, slot = picks(picked, slots, place + 2 * BLOCK_N, end, behind, sink)
                if visible is not None:  # masks the rows after they are loaded, so that their loads need not wait
                    seen = ahead != 0
                    if not ONE:
                        later = place + BLOCK_N
                        ahead = tl.load(
                            visible + (later - behind).to(tl.int64) * m_row, mask=(later >= behind) & (later < end), other=0
                        )
                if ring is not None and phase == 0:
                    age = place - sink - oldest
                    age = tl.where(age < 0, age + ring, age)
                    kept = tl.where(place < sink, place < past, age < past - start) & (place < behind)
                    seen = seen | kept if visible is not None or (table is not None and PHASES == 1) else kept
                    seen = seen & inside
                if ONE and new_key is not None:
                    seen = seen | is_new
                if phase == 0 and (visible is not None or ring is not None):
                    v = tl.where(seen[:, None], v, 0.0)
                if UPCAST:
                    k, v = k.to(tl.float32), v.to(tl.float32)
                score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if FP8 and phase == PHASES - 1:
                    score *= k_scale[None, :]
                score = _capped(score, scale, softcap)
                if log_weight is not None:
                    where = log_weight + b * w_seq + heads[:, None] * w_head + place[None, :]
                    score += tl.load(where, mask=is_head[:, None] & inside[None, :], other=0.0) * LOG2E
                score = tl.where(seen[None, :], score, float("-inf"))
                new = tl.maximum(top, tl.max(score, 1))
                shift = tl.where(new == float("-inf"), 0.0, new)
                weight = tl.exp2(score - shift[:, None])
                decay = tl.exp2(top - shift)
                sums = sums * decay[:, None] + weight
                if FP8 and phase == PHASES - 1:
                    weight *= v_scale[None, :]
                acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
                top = new

        total = tl.sum(sums, 1)
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        lse = tl.where(some, tl.where(some, top, 0.0) + tl.log2(divisor), float("-inf"))
        part = (b * HEADS * GROUP + heads) * splits + split
        tl.store(lse_parts + part, lse, mask=is_head)
        filled = (is_head & some)[:, None] & is_dim[None, :]
        tl.store(acc_parts + part[:, None] * DIM + d[None, :], acc / divisor[:, None], mask=filled)

        # The last program of the KV head merges the splits. acq_rel orders every program's stores before its ticket; the
        # results are loaded past the L1 cache (.cg).
        tl.debug_barrier()
        ticket = tickets + b * (HEADS + 1) + 1 + h
        arrived = tl.atomic_add(ticket, 1, sem="acq_rel")
        if arrived == used - 1:
            tl.store(ticket, 0)
            merge_splits(
                acc_parts, lse_parts, sinks, more_out, more_lse, out, b * HEADS * GROUP, h * GROUP, splits, used, GROUP, DIM,
                BLOCK_D, MERGE_G, MERGE_S, CHUNK,
            )  # fmt: skip


def flash_decode(step: DecodeStep, places: Places | InPlace, tickets: Tensor | None = None) -> Tensor:
    """Launch the kernel: as `definition`, but return only the output, [B, Hq, D] in the dtype of query.

    Does not read keys outside [starts, lengths). Keys and values may be float8_e4m3fn; they are multiplied in float16, or
    in float32 if query is.
    tickets: [B, 1 + H] int32 zeros or more rows. The kernel resets them to zero, so one tensor serves many steps, also of fewer
        sequences. Exception: tickets[b, 0] becomes and stays 1 once a newest key or value of sequence b is not finite.
    """
    query, keys, values, log_weight, sinks = step.query, step.keys, step.values, step.log_weight, step.sinks
    lengths, starts, newest = (
        (None, None, None) if isinstance(places, AnyOrder) else (places.lengths, places.starts, places.newest)
    )
    regions = places.regions if isinstance(places, (InSlab, InPlace)) else None
    selected, visible = (places.selected, None) if isinstance(places, InPlace) else (None, places.visible)
    batch, q_heads, dim = query.shape
    heads, n = keys.shape[1:3]
    assert keys.shape == values.shape == (batch, heads, n, dim)
    assert q_heads % heads == 0, f"{q_heads} query heads on {heads} KV heads"
    assert query.stride(2) == keys.stride(3) == values.stride(3) == 1, "the last dimension is contiguous"
    assert keys.dtype == values.dtype, f"{keys.dtype} and {values.dtype}"
    for bound in (lengths, starts):
        assert bound is None or (bound.dtype == torch.int32 and bound.shape == (batch,) and bound.is_contiguous())
    new_key, new_value = newest or (None, None)
    for new in (new_key, new_value):
        assert new is None or (new.shape == (batch, heads, dim) and new.stride(2) == 1)
    behind = 0 if regions is None else regions.held
    if isinstance(places, InSlab) and visible is None:
        assert n == behind, f"visible is None, but only {behind} of {n} slots are sink and ring"
    rows = slots = table = counts = totals = None
    row_bytes, stored_bytes, fp8 = 0, 0, False
    if selected is not None:
        if isinstance(selected, Selected):
            rows, slots, (counts, totals) = selected.rows, selected.slots, selected.tally or (None, None)
        n = behind + (selected.width if isinstance(selected, Every) else selected.rows.shape[2])
        table, row_bytes = selected.table, 2 * dim * keys.element_size()
        stored_bytes, fp8 = (row_bytes, False) if selected.format is None else (selected.format.row_bytes, selected.format.fp8)
        assert values.storage_offset() - keys.storage_offset() == dim and keys.stride(2) == values.stride(2) == 2 * dim
        for each in (one for one in (rows, slots) if one is not None):
            assert each.dtype == torch.int32 and each.is_contiguous() and each.shape == (batch, heads, n - behind)
        assert table.dtype == torch.int64 and table.stride(1) == 1 and len(table) == batch
        if counts is not None and totals is not None:
            assert counts.dtype == torch.int32 and counts.is_contiguous() and counts.shape == (batch, heads)
            assert totals.dtype == torch.int64 and totals.shape == (4,)
    assert visible is None or (visible.dtype == torch.bool and visible.shape == (batch, heads, n - behind))
    if log_weight is not None:
        assert log_weight.dtype == torch.float32 and log_weight.shape == (batch, q_heads, n) and log_weight.stride(2) == 1
    assert sinks is None or (sinks.shape == (q_heads,) and sinks.is_contiguous())
    more = step.partials[0] if len(step.partials) == 1 else None
    if len(step.partials) > 1:
        more = Partial(*merge([p.out for p in step.partials], [p.lse for p in step.partials]))
    more_out, more_lse = (None, None) if more is None else (more.out.float().contiguous(), more.lse.float().contiguous())

    whole = selected is not None and rows is None and not fp8
    split = split_for(batch * heads, n, dim, keys.itemsize, multiprocessors(query.device), selected is not None, whole)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    acc = torch.empty((batch, q_heads, split.splits, dim), dtype=torch.float32, device=query.device)
    parts = torch.empty((batch, q_heads, split.splits), dtype=torch.float32, device=query.device)
    if tickets is None:
        tickets = torch.zeros((batch, 1 + heads), dtype=torch.int32, device=query.device)
    assert tickets.dtype == torch.int32 and tickets.is_contiguous()
    assert len(tickets) >= batch and tickets.shape[1] == 1 + heads
    group, interpreted = q_heads // heads, query.device.type == "cpu"
    if interpreted and sinks is not None:  # the interpreter supports no bfloat16 scalars or products
        sinks = sinks.float()
    block_d, merge_g, one = triton_block(dim, 16), triton_block(group), split.splits * split.block >= n
    # Rows of the slab and rows of 8 bits have tiles of their own; float32 is multiplied in parts.
    both = (fp8 and slots is not None) or keys.dtype == torch.float32
    tile = split.block * 2 * triton_block(dim) * keys.element_size() * (2 if both else 1)
    _attend[(batch * heads, split.splits)](
        query, keys, values, new_key, new_value, visible, rows, slots, table, counts, totals, lengths, starts, log_weight, sinks,
        more_out, more_lse, acc, parts, tickets, out, *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *((0, 0) if new_key is None else new_key.stride()[:2]), *((0, 0) if new_value is None else new_value.stride()[:2]),
        *((0, 0, 0) if visible is None else visible.stride()), *((0, 0) if log_weight is None else log_weight.stride()[:2]),
        0 if table is None else table.stride(0), n, *((None, None) if regions is None else (regions.sink, regions.ring)),
        row_bytes, stored_bytes, None if selected is None else selected.block_size, step.scale, step.softcap,
        HEADS=heads, GROUP=group, DIM=dim, BLOCK_G=triton_block(group, 16), BLOCK_D=block_d, BLOCK_N=split.block,
        UPCAST=interpreted, MERGE_G=merge_g, MERGE_S=triton_block(split.splits),
        CHUNK=max(1, min(triton_block(split.splits), 64 * 32 * split.warps // (merge_g * block_d))),
        ONE=one, ALIGN=16 if row_bytes % 32 == 0 else keys.element_size(), FP8=fp8, NATIVE=nvidia(query.device, (8, 9)),
        PHASES=2 if selected is not None and slots is None and not one else 1, EACH=0 if one else split.each, num_warps=split.warps,
        num_stages=stages_for(split.stages, tile, shared_memory(query.device)),
    )  # fmt: skip
    return out
