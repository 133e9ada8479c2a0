"""The kernels of a captured decode step, each checked against its definition and then timed as replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvthaw.kernels import flash_decode as flash
from kvthaw.kernels.admit import admit
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep, TokenOrder
from kvthaw.kernels.uva_gather import uva_gather
from lab.definitions import admit as admit_definition
from lab.kernels import BUS_GBPS, COLD, DIM, GROUP, HEADS, agree, copies, demand, micros, rates, replay_time, rotated
from lab.script import run_kernels

_CALLS = 16


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for batch in (1, 16) if quick else (1, 4, 16):
        for n in (256, 1024) if quick else (256, 1024, 2048):
            yield decode(batch, n, masked=True)
            yield decode(batch, n, masked=False)
    for n in (131072,) if quick else (32768, 131072, 524288):
        yield decode(1, n, masked=False)
    for count, slots in ((100, 100), (1024, 1024)) if quick else ((100, 100), (256, 256), (1024, 1024), (1024, 2048)):
        yield residency(count, slots)
    for count in (100, 1024):
        yield gather(count, 16384 if quick else 131072)


class Sets:
    """Sets of inputs enough that none of them is still in the L2 cache when its turn comes again."""

    def __init__(self, batch: int, n: int) -> None:
        self.bytes = batch * HEADS * n * 2 * DIM * 2
        shape = (batch, HEADS, n, 2, DIM)
        self.slabs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies(self.bytes))]
        self.gathered = [slab.transpose(2, 3).contiguous() for slab in self.slabs]
        self.query = torch.randn(batch, HEADS * GROUP, DIM, device="cuda").bfloat16()
        self.visible = torch.rand(batch, HEADS, n, device="cuda") < 0.95
        self.lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")

    def calls(self, call: Callable[[Tensor], object], of: Sequence[Tensor]) -> list[Callable[[], object]]:
        """A call for each set, so often that a graph of them is long."""
        return rotated(call, of, _CALLS if self.bytes < COLD else 4)


def decode(batch: int, n: int, *, masked: bool) -> dict[str, Any]:
    """flash_decode over n keys, under a mask or with lengths, beside SDPA on gathered KV: the faster of its two ways, a group's
    queries as rows of one head or as heads of their own. Without a mask torch splits the keys only for the latter."""
    sets = Sets(batch, n)
    scale, places = DIM**-0.5, AnyOrder(sets.visible) if masked else TokenOrder(sets.lengths)

    def ours(slab: Tensor) -> Tensor:
        return flash.flash_decode(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], scale=scale), places)

    mask = sets.visible[:, :, None] if masked else None
    masks = None if mask is None else mask.repeat_interleave(GROUP, dim=1)

    def rows(kv: Tensor) -> Tensor:
        folded = sets.query.view(batch, HEADS, GROUP, DIM)
        return scaled_dot_product_attention(folded, kv[:, :, 0], kv[:, :, 1], attn_mask=mask, scale=scale)

    def heads(kv: Tensor) -> Tensor:
        query = sets.query[:, :, None]
        return scaled_dot_product_attention(query, kv[:, :, 0], kv[:, :, 1], attn_mask=masks, scale=scale, enable_gqa=True)

    slab = sets.slabs[0]
    want = flash.definition(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], scale=scale), places).out
    error = agree(ours(slab), want, "flash_decode")
    theirs = {}
    for name, sdpa in (("rows", rows), ("heads", heads)):
        agree(sdpa(sets.gathered[0]).reshape(want.shape), want, f"scaled_dot_product_attention, queries as {name}", 2e-2)
        theirs[name] = replay_time(sets.calls(sdpa, sets.gathered))
    seconds, way = replay_time(sets.calls(ours, sets.slabs)), min(theirs, key=lambda name: theirs[name])
    return {
        "op": "flash_decode",
        "batch": batch,
        "n": n,
        "masked": masked,
        **rates(seconds, sets.bytes),
        "sdpa_us": micros(theirs[way]),
        "sdpa_queries_as": way,
        "error": round(error, 5),
    }


def residency(count: int, slots: int, rows: int = 131072, kept: float = 0.7) -> dict[str, Any]:
    """admit of selections that keep a share of their rows from step to step, beside its definition in torch."""
    chosen = selections(count, rows, kept)

    def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shapes = ((1, HEADS, rows + 1, -1), (1, HEADS, slots + 1, -1), (1, HEADS, slots + 1, 0))
        a, b, c = (torch.full(shape[:3], shape[3], dtype=torch.int32, device="cuda") for shape in shapes)
        return a, b, c, torch.zeros(4, dtype=torch.int64, device="cuda")

    mine, other, what = tables(), tables(), f"admit of {count} rows to {slots} slots"
    for wanted in (*chosen, *chosen):
        pairs = zip(admit(wanted, *mine), admit_definition(wanted, *other), strict=True)
        demand(all(torch.equal(a, b) for a, b in pairs), f"{what} differs from its definition")
    demand(all(map(torch.equal, mine, other)), f"{what} leaves other tables than its definition")
    fetched: list[Tensor] = []
    ours = replay_time([lambda wanted=wanted: fetched.append(admit(wanted, *mine)[1]) for wanted in chosen])  # type: ignore[misc]
    hits = 1 - float(torch.stack([(f >= 0).float().mean() for f in fetched[-len(chosen) :]]).mean())
    theirs = replay_time([partial(admit_definition, wanted, *other) for wanted in chosen])
    times = {"us": micros(ours), "torch_us": micros(theirs), "hit_rate": round(hits, 3)}
    return {"op": "admit", "rows": count, "slots": slots, **times}


def selections(count: int, rows: int, kept: float) -> list[Tensor]:
    """Selections [1, HEADS, count] one after the other, each with a share of the rows before it."""
    current = torch.stack([torch.randperm(rows, device="cuda")[:count] for _ in range(HEADS)])
    made = []
    for _ in range(_CALLS):
        heads = []
        for head in current:
            stays = head[torch.rand(count, device="cuda") < kept]
            others = torch.randperm(rows, device="cuda")
            others = others[~torch.isin(others, head)]
            mixed = torch.cat((stays, others))[:count]
            heads.append(mixed[torch.randperm(count, device="cuda")])
        current = torch.stack(heads)
        made.append(current[None].int().contiguous())
    return made


def gather(count: int, tokens: int, block_size: int = 1024, *, batch: int = 1) -> dict[str, Any]:
    """uva_gather of `count` scattered rows a sequence and head out of pinned memory, which the sequences share."""
    store = torch.empty((tokens // block_size, HEADS, block_size, 2, DIM), dtype=torch.bfloat16, pin_memory=True)
    for part in store:
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    table = torch.tensor([[part.data_ptr() for part in store]] * batch, device="cuda")
    slab = torch.full((batch, HEADS, count, 2, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")

    def drawn(below: int) -> Tensor:
        return torch.rand(batch, HEADS, below, device="cuda").argsort(dim=2)[:, :, :count].int()

    slots, chosen = drawn(count), [drawn(tokens) for _ in range(_CALLS)]
    uva_gather(table, block_size, slab, chosen[0], slots, 0)
    row, head = chosen[0].cpu().long(), torch.arange(HEADS)[None, :, None]
    want = store[row // block_size, head, row % block_size].cuda()
    came = slab.gather(2, slots.long()[..., None, None].expand(-1, -1, -1, 2, DIM))
    demand(torch.equal(came, want), "uva_gather brought other rows than it was asked for")
    seconds = replay_time([partial(uva_gather, table, block_size, slab, fetch, slots, 0) for fetch in chosen])
    moved = batch * HEADS * count * 2 * DIM * 2
    about = {"op": "uva_gather", "rows": batch * HEADS * count, "row_bytes": 4 * DIM, "batch": batch}
    return {**about, **rates(seconds, moved, BUS_GBPS)}


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "kernels"})
