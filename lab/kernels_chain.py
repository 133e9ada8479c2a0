"""All launches of a layer's retrieval one after the other, as a captured step has them: select, admit, fetch, attend.

A graph of 8 layers, each with tables of its own. Every layer is asked twice, with queries of which the second brings other rows
(pariskv-plus: nearly all are new; the others: `hits` are there). us: of a layer. Attention is compared with its definition over
what the slab holds, before and after it is timed.

`choice`: of units alone, by how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.kernels import flash_decode as flash
from kvthaw.kernels import unit_select
from kvthaw.kernels.admit import admit
from kvthaw.kernels.decode_step import DecodeStep, InSlab, TokenOrder
from kvthaw.kernels.in_place import InPlace, Selected
from kvthaw.kernels.row_format import E4M3
from kvthaw.kernels.split import Split, split_for
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.uva_gather import uva_gather
from kvthaw.regions import Regions
from lab import definitions, kernels_pariskv
from lab.kernels import DIM, GROUP, HEADS, SHAPE, agree, demand, differing, micros, replay_time
from lab.kernels_pages import ROWS, Tables, tables, window
from lab.script import run_kernels

LAYERS, BLOCK = 8, 1024
REGIONS = Regions(kernels_pariskv.SINK, kernels_pariskv.WINDOW, kernels_pariskv.BUFFER)
METHODS = ("pariskv-plus", "clusterkv-plus", "prkv")


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for tokens in (36864,) if quick else (36864, 131072, 524288):
        for method in METHODS:
            yield chain(method, tokens)
            torch.cuda.empty_cache()
    yield chain("pariskv-plus", 131072, fp8=True)
    for units in (1152,) if quick else (1152, 2048, 4096, 16384):
        yield choice(units)
    for tokens in (131072,) if quick else (131072, 524288):
        yield from eight_bits(tokens)


@dataclass(slots=True)
class Host:
    """Rows in pinned blocks, the same for all layers, and where they lie."""

    blocks: Tensor
    table: Tensor
    format: E4M3 | None

    @classmethod
    def of(cls, tokens: int, *, fp8: bool, device: str = "cuda") -> Host:
        format = E4M3(DIM, torch.bfloat16) if fp8 else None
        count = -(-tokens // BLOCK) + 1
        tail, dtype = ((2, DIM), torch.bfloat16) if format is None else (format.tail, format.stored)
        blocks = torch.empty((count, HEADS, BLOCK, *tail), dtype=dtype, pin_memory=device == "cuda")
        for block in blocks:
            rows = torch.randn(HEADS, BLOCK, 2, DIM, device=device, dtype=torch.bfloat16)
            block.copy_(rows if format is None else format.encode(rows))
        return cls(blocks, torch.tensor([[block.data_ptr() for block in blocks]], device=device), format)


class Layer:
    """A layer's slab and residency, and how it selects."""

    def __init__(self, select: Callable[[Tensor], Tensor], host: Host, tokens: int, slots: int, device: str = "cuda") -> None:
        self.select, self.host = select, host
        self.slab = torch.randn(1, HEADS, REGIONS.held + slots, 2, DIM, device=device).bfloat16()
        sizes = (tokens + BLOCK + 1, -1), (slots + 1, -1), (slots + 1, 0)
        self.row_slot, self.slot_row, self.used = (
            torch.full((1, HEADS, n), what, dtype=torch.int32, device=device) for n, what in sizes
        )
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)
        self.tickets = torch.zeros((1, 1 + HEADS), dtype=torch.int32, device=device)
        lengths = (tokens, tokens - REGIONS.held + REGIONS.sink)
        self.lengths, self.starts = (torch.full((1,), n, dtype=torch.int32, device=device) for n in lengths)
        self.new = torch.randn(2, 1, HEADS, DIM, device=device).bfloat16()

    def attend(self, query: Tensor) -> tuple[DecodeStep, InSlab, Tensor]:
        """All launches for one query. Returns the step that attention took, its places, and its output."""
        slots, fetch, live = admit(self.select(query), self.row_slot, self.slot_row, self.used, self.counts)
        uva_gather(self.host.table, BLOCK, self.slab, fetch, slots, REGIONS.held, None, self.host.format)
        step = DecodeStep(query, self.slab[:, :, :, 0], self.slab[:, :, :, 1], scale=DIM**-0.5)
        places = InSlab(REGIONS, self.lengths, self.starts, (self.new[0], self.new[1]), live)
        return step, places, flash.flash_decode(step, places, self.tickets)


def chain(method: str, tokens: int, *, fp8: bool = False, device: str = "cuda") -> dict[str, Any]:
    """The launches of a method."""
    host, few = Host.of(tokens, fp8=fp8, device=device), method == "pariskv-plus"
    layers, asked = [], []
    for _ in range(LAYERS):
        layers.append(Layer(selection(method, tokens, device), host, tokens, kernels_pariskv.K if few else ROWS, device))
        first, other = (torch.randn(1, HEADS * GROUP, DIM, device=device) * 2 for _ in range(2))
        asked += [first.bfloat16(), (other if few else 0.75 * first + 0.66 * other).bfloat16()]
    pairs = [(layers[i // 2], query) for i, query in enumerate(asked)]
    for _ in range(2):
        for layer, query in pairs:
            step, places, out = layer.attend(query)
            agree(out, flash.definition(step, places).out, f"{method}: attention behind a fetch", 2e-2)
    before = [layer.counts.clone() for layer in layers]
    line: dict[str, Any] = {"op": "chain", "method": method, "tokens": tokens, "fp8": fp8}
    if device == "cuda":
        line["us"] = micros(replay_time([partial(layer.attend, query) for layer, query in pairs], 30))
        alone = [partial(layer.select, query) for layer, query in pairs]
        line["select_us"] = micros(replay_time(alone, 30))
        for layer, query in pairs:  # what a graph's replays left
            step, places, out = layer.attend(query)
            agree(out, flash.definition(step, places).out, f"{method}: attention after the replays", 2e-2)
    moved = sum((layer.counts - was for layer, was in zip(layers, before, strict=True)), torch.zeros_like(before[0])).tolist()
    return line | ({"hits": round(1 - moved[1] / moved[0], 3)} if moved[0] else {})


def selection(method: str, tokens: int, device: str) -> Callable[[Tensor], Tensor]:
    """What selects rows of a layer."""
    if method == "pariskv-plus":
        index = kernels_pariskv.make(1, tokens, device=device)
        return lambda query: index.select(query, kernels_pariskv.K).rows
    made, recent = (
        tables(method, tokens, 1, torch.device(device)),
        window(1, torch.device(device)) if method == "prkv" else None,
    )
    return lambda query: chosen(made, query, recent)[0]


def chosen(made: Tables, query: Tensor, recent: RecentQueries | None = None) -> tuple[Tensor, Tensor]:
    """Choose ROWS rows of units."""
    how: dict[str, Any] = {"first": 16, "budget": ROWS, "scale": DIM**-0.5, "policy": "max", "recent": recent}
    return unit_select.launch(query, made.digests, made.stops, made.order, made.counts, **how)


def choice(units: int) -> dict[str, Any]:
    """Choosing among so many units of 32 tokens, their scores with it, by one program a head and in chunks."""
    sets = [tables("clusterkv-plus", units * 32, 1, torch.device("cuda")) for _ in range(LAYERS)]
    query = torch.randn(1, HEADS * GROUP, DIM, device="cuda").bfloat16()
    how: dict[str, Any] = {"first": 16, "budget": ROWS, "scale": DIM**-0.5, "policy": "max"}
    line, most = {"op": "choice", "units": units}, unit_select.ALONE
    for name, alone in (("at_once_us", units), ("in_chunks_us", 0)):
        if alone > most:
            continue
        unit_select.ALONE = alone
        for made in sets[:2]:
            want, counts = unit_select.definition(query, made.digests, made.stops, made.order, made.counts, **how)
            rows, found = chosen(made, query)
            demand(
                torch.equal(counts, found) and differing(rows, want) <= 128, f"{units} units: rows differ from the definition's"
            )
        line[name] = micros(replay_time([partial(chosen, made, query) for made in sets]))
    unit_select.ALONE = most
    return line


def eight_bits(tokens: int) -> Iterator[dict[str, Any]]:
    """Full attention over keys and values of 8 bits, by how it is split."""
    slabs = [torch.randn(1, HEADS, tokens, 2, DIM, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    query = torch.randn(1, HEADS * GROUP, DIM, device="cuda").bfloat16()
    lengths = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    new = torch.randn(2, 1, HEADS, DIM, device="cuda").bfloat16()
    places = TokenOrder(lengths, (new[0], new[1]))
    steps = [DecodeStep(query, s[:, :, :, 0], s[:, :, :, 1], scale=DIM**-0.5) for s in slabs]
    want, usual = [flash.definition(step, places).out for step in steps], split_for
    for block, warps, stages, per in (
        (128, 4, 3, 2),
        (128, 4, 4, 2),
        (128, 8, 3, 2),
        (64, 4, 3, 3),
        (64, 4, 4, 4),
        (64, 4, 1, 6),
    ):
        how = Split(block, 132 * per // HEADS, warps, stages)
        setattr(flash, "split_for", lambda *_, how=how: how)  # noqa: B010
        line = {"op": "eight_bits", "tokens": tokens, "block": block, "warps": warps, "stages": stages, "programs": per}
        try:
            for step, each in zip(steps, want, strict=True):
                agree(flash.flash_decode(step, places), each, "attention over 8 bits", 2e-2)
            line["us"] = micros(replay_time([partial(flash.flash_decode, step, places) for step in steps * 4]))
        except Exception as error:  # of shared memory
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield line
    setattr(flash, "split_for", usual)  # noqa: B010
    yield stored_rows(tokens)


def stored_rows(tokens: int, device: str = "cuda") -> dict[str, Any]:
    """Attention over rows of 8 bits with their scales, all of them, as it reads them in blocks on the device."""
    format = E4M3(DIM, torch.bfloat16)
    slab = torch.randn(1, HEADS, REGIONS.held, 2, DIM, device=device).bfloat16()
    rows = torch.randn(tokens // BLOCK, HEADS, BLOCK, 2, DIM, device=device).bfloat16()
    blocks = format.encode(rows)
    table = torch.tensor([[block.data_ptr() for block in blocks]], device=device)
    query, new = (
        torch.randn(1, HEADS * GROUP, DIM, device=device).bfloat16(),
        torch.randn(2, 1, HEADS, DIM, device=device).bfloat16(),
    )
    every = torch.arange(tokens, dtype=torch.int32, device=device).expand(1, HEADS, -1).contiguous()
    lengths, starts = (
        torch.full((1,), 1 << 20, dtype=torch.int32, device=device) - n for n in (0, REGIONS.held - REGIONS.sink)
    )
    held = REGIONS, lengths, starts, (new[0], new[1])
    selected = Selected(every, None, table, BLOCK, None, format)
    step, places = DecodeStep(query, slab[:, :, :, 0], slab[:, :, :, 1], scale=DIM**-0.5), InPlace(*held, selected)
    found = flash.flash_decode(step, places)
    keys, values = definitions.in_place(selected, [list(blocks)], step.keys, step.values, REGIONS.held)
    seen = torch.ones(1, HEADS, tokens, dtype=torch.bool, device=device)
    copied = replace(step, keys=keys, values=values)
    agree(found, flash.definition(copied, InSlab(*held, seen)).out, "attention over stored rows", 2e-2)
    us = {"us": micros(replay_time([partial(flash.flash_decode, step, places)] * 4))} if device == "cuda" else {}
    return {"op": "stored_rows", "tokens": tokens, **us}


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE)
