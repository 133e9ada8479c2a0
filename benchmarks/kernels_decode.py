"""The kernels of a captured decode step, each checked against its definition and then timed as replays of a CUDA graph."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.script import Report, run_kernels
from kvthaw.errors import CacheError
from kvthaw.kernels import flash_decode as flash
from kvthaw.kernels.admit import admit
from kvthaw.kernels.admit import definition as admit_definition
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.split import Split
from kvthaw.kernels.uva_gather import uva_gather

DEVICE_GBPS, BUS_GBPS = 4300, 55
"""What one H200 was measured to move: device memory, read and written; pinned memory over the bus."""
HEADS, GROUP, DIM = 8, 4, 128
_COLD = 256 << 20  # bytes to pass over before a buffer may be read again: four times the L2 cache
_CALLS = 16


def main(
    *, quick: bool = False, sweep: bool = False, out: Path | None = None, commit: str | None = None
) -> list[dict[str, Any]]:
    """Check, measure and print a JSON line a case. quick: fewer and shorter ones. sweep: also other splits of flash_decode."""
    if not torch.cuda.is_available():
        raise CacheError("timing kernels needs a CUDA device; their definitions and checks run in the tests without one")
    torch.manual_seed(time.time_ns() % (1 << 31))
    report = Report(out, commit, bench="kernels")
    with torch.inference_mode():
        for batch in (1, 16) if quick else (1, 4, 16):
            for n in (256, 1024) if quick else (256, 1024, 2048):
                report(decode(batch, n, masked=True))
                report(decode(batch, n, masked=False))
        for n in (131072,) if quick else (32768, 131072, 524288):
            report(decode(1, n, masked=False))
        for count, slots in ((100, 100), (1024, 1024)) if quick else ((100, 100), (256, 256), (1024, 1024), (1024, 2048)):
            report(residency(count, slots))
        for count in (100, 1024):
            report(gather(count, 16384 if quick else 131072))
        if sweep:
            for n in (1024, 131072):
                for line in splits(n):
                    report(line)
    return report.lines


def replay_time(calls: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Seconds a call takes in a graph of them all, the median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and makes what must exist before a capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1000 / len(calls)


def rates(seconds: float, moved: int, limit: float) -> dict[str, Any]:
    """Time, bytes and their share of what the device can move."""
    speed = moved / seconds / 1e9
    return {"us": round(seconds * 1e6, 2), "bytes": moved, "gbps": round(speed, 1), "share": round(speed / limit, 3)}


def agree(got: Tensor, want: Tensor, what: str, limit: float = 1e-2) -> float:
    """The distance over the norm. Raises CacheError where it is above the limit or not a number."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < limit:
        raise CacheError(f"{what} differs from its definition by {error:.4f} of the norm")
    return error


class Sets:
    """Sets of inputs enough that none of them is still in the L2 cache when its turn comes again."""

    def __init__(self, batch: int, n: int) -> None:
        self.bytes = batch * HEADS * n * 2 * DIM * 2
        count = max(1, math.ceil(_COLD / self.bytes))
        shape = (batch, HEADS, n, 2, DIM)
        self.slabs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self.gathered = [slab.transpose(2, 3).contiguous() for slab in self.slabs]
        self.query = torch.randn(batch, HEADS * GROUP, DIM, device="cuda").bfloat16()
        self.visible = torch.rand(batch, HEADS, n, device="cuda") < 0.95
        self.lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")

    def calls(self, call: Callable[[Tensor], object], of: Sequence[Tensor]) -> list[Callable[[], object]]:
        """A call for each set, so often that a graph of them is long."""

        def on(tensor: Tensor) -> Callable[[], object]:
            return lambda: call(tensor)

        return [on(of[i % len(of)]) for i in range(max(_CALLS if self.bytes < _COLD else 4, len(of)))]


def decode(batch: int, n: int, *, masked: bool) -> dict[str, Any]:
    """flash_decode over n keys, under a mask or with lengths, beside SDPA on gathered KV: the faster of its two ways, a group's
    queries as rows of one head or as heads of their own. Without a mask torch splits the keys only for the latter."""
    sets = Sets(batch, n)
    scale = DIM**-0.5
    how: dict[str, Any] = {"scale": scale, **({"visible": sets.visible} if masked else {"lengths": sets.lengths})}

    def ours(slab: Tensor) -> Tensor:
        return flash.flash_decode(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], **how))

    mask = sets.visible[:, :, None] if masked else None
    masks = None if mask is None else mask.repeat_interleave(GROUP, dim=1)

    def rows(kv: Tensor) -> Tensor:
        folded = sets.query.view(batch, HEADS, GROUP, DIM)
        return scaled_dot_product_attention(folded, kv[:, :, 0], kv[:, :, 1], attn_mask=mask, scale=scale)

    def heads(kv: Tensor) -> Tensor:
        query = sets.query[:, :, None]
        return scaled_dot_product_attention(query, kv[:, :, 0], kv[:, :, 1], attn_mask=masks, scale=scale, enable_gqa=True)

    slab = sets.slabs[0]
    want = flash.definition(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], **how)).out
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
        **rates(seconds, sets.bytes, DEVICE_GBPS),
        "sdpa_us": round(theirs[way] * 1e6, 2),
        "sdpa_queries_as": way,
        "error": round(error, 5),
    }


def splits(n: int) -> list[dict[str, Any]]:
    """flash_decode at batch 1 under other splits than the one it chooses, best first."""
    sets = Sets(1, n)
    how: dict[str, Any] = {"scale": DIM**-0.5, "lengths": sets.lengths}
    slab = sets.slabs[0]
    want = flash.definition(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], **how)).out

    def ours(slab: Tensor) -> Tensor:
        return flash.flash_decode(DecodeStep(sets.query, slab[:, :, :, 0], slab[:, :, :, 1], **how))

    if n <= 4096:
        tried = [Split(block, -(-n // block), warps, 2) for block in (16, 32, 64, 128) for warps in (1, 2, 4)]
    else:
        shapes = ((32, 2, 4), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 3), (128, 8, 3))
        tried = [Split(block, each * 132 // HEADS, warps, st) for block, warps, st in shapes for each in (1, 2, 3)]
    lines = []
    for split in tried:
        with mock.patch.object(flash, "split_for", lambda *_, split=split: split):
            try:
                agree(ours(slab), want, f"flash_decode with {split}")
                seconds = replay_time(sets.calls(ours, sets.slabs))
            except CacheError:
                raise
            except Exception as reason:  # more shared memory or registers than there are
                lines.append({"op": "split", "n": n, "us": math.inf, "split": str(split), "error": str(reason)[:80]})
                continue
        lines.append({"op": "split", "n": n, **rates(seconds, sets.bytes, DEVICE_GBPS), "split": str(split)})
    lines = sorted(lines, key=lambda line: float(str(line["us"])))
    return [{**line, "us": None} if line["us"] == math.inf else line for line in lines]


def residency(count: int, slots: int, rows: int = 131072, kept: float = 0.7) -> dict[str, Any]:
    """admit of selections that keep a share of their rows from step to step, beside its definition in torch."""
    chosen = selections(count, rows, kept)

    def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shapes = ((1, HEADS, rows + 1, -1), (1, HEADS, slots + 1, -1), (1, HEADS, slots + 1, 0))
        a, b, c = (torch.full(shape[:3], shape[3], dtype=torch.int32, device="cuda") for shape in shapes)
        return a, b, c, torch.zeros(4, dtype=torch.int64, device="cuda")

    mine, other = tables(), tables()
    for _ in range(2):
        for wanted in chosen:
            pairs = zip(admit(wanted, *mine), admit_definition(wanted, *other), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                raise CacheError(f"admit of {count} rows to {slots} slots differs from its definition")
    if not all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)):
        raise CacheError(f"admit of {count} rows to {slots} slots leaves other tables than its definition")

    def step(
        call: Callable[..., tuple[Tensor, Tensor, Tensor]], state: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> list[Callable[[], object]]:
        def on(wanted: Tensor) -> Callable[[], object]:
            return lambda: fetched.append(call(wanted, *state)[1])

        return [on(wanted) for wanted in chosen]

    fetched: list[Tensor] = []
    ours = replay_time(step(admit, mine))
    hits = 1 - float(torch.stack([(f >= 0).float().mean() for f in fetched[-len(chosen) :]]).mean())
    theirs = replay_time(step(admit_definition, other))
    return {
        "op": "admit",
        "rows": count,
        "slots": slots,
        "us": round(ours * 1e6, 2),
        "torch_us": round(theirs * 1e6, 2),
        "hit_rate": round(hits, 3),
    }


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
    if not torch.equal(slab.gather(2, slots.long()[..., None, None].expand(-1, -1, -1, 2, DIM)), want):
        raise CacheError("uva_gather brought other rows than it was asked for")

    def bring(fetch: Tensor) -> Callable[[], object]:
        return lambda: uva_gather(table, block_size, slab, fetch, slots, 0)

    seconds = replay_time([bring(fetch) for fetch in chosen])
    moved = batch * HEADS * count * 2 * DIM * 2
    about = {"op": "uva_gather", "rows": batch * HEADS * count, "row_bytes": 4 * DIM, "batch": batch}
    return {**about, **rates(seconds, moved, BUS_GBPS)}


if __name__ == "__main__":
    run_kernels(main, __doc__, {"sweep": (False, "also other splits of flash_decode")})
