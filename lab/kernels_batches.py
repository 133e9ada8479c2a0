"""What a layer's retrieval takes in batches: select of clusterkv-plus and pariskv-plus, attention that reads selected rows in
their blocks on the device, in the model's dtype and in 8 bits, and fetching rows that lie on the host. Each is checked, then
timed, beside what its bytes alone take (floor_us).

`--batches 4,16,64 --lengths 8192,32768,131072`: what exceeds `--most` tokens in all is left out. `--only-attention`: nothing else.
`--whole 256x1100,100r`: attention that reads all rows of whole blocks, of 256 sequences of 1,100 tokens, and of 100 ragged ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.step import bucket
from kvthaw.kernels import in_place
from kvthaw.kernels.decode_step import DecodeStep, InSlab
from kvthaw.kernels.flash_decode import definition, flash_decode
from kvthaw.kernels.in_place import Every, InPlace
from kvthaw.kernels.row_format import E4M3, RowFormat
from kvthaw.regions import Regions
from lab import definitions, kernels_pages, kernels_pariskv
from lab.kernels import BUS_GBPS, DEVICE_GBPS, DIM, GROUP, HEADS, SHAPE, agree, rates, replay_time
from lab.kernels_decode import gather
from lab.script import run_kernels

HELD = {"clusterkv-plus": (Regions(16, 16, 16), 976), "pariskv-plus": (Regions(128, 256, 512), 100)}
"""Regions and rows of a step: of a budget of 1,024 tokens, and of 100 rows beside the paper's regions."""
_SETS = 4  # of rows, so that none is in the L2 cache when its turn comes again
_DTYPE = torch.bfloat16


def lines(
    *, quick: bool, only_attention: bool, batches: str, lengths: str, most: int, whole: str = ""
) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    every = cases(quick=quick, only_attention=only_attention, batches=batches, lengths=lengths, most=most)
    for line in chain(map(attention_to_all, filter(None, whole.split(","))), every):
        limit = BUS_GBPS if line["op"] == "fetch" else DEVICE_GBPS
        yield line | {"floor_us": round(line["bytes"] / limit / 1e3, 2)}


def cases(*, quick: bool, only_attention: bool, batches: str, lengths: str, most: int) -> Iterator[dict[str, Any]]:
    """Check and measure."""
    sizes = [(int(batch), int(tokens)) for tokens in lengths.split(",") for batch in batches.split(",")]
    for batch, tokens in sizes[:1] if quick else sizes:
        if batch * tokens <= most:
            if not only_attention:
                yield from selects(batch, tokens)
            for method in HELD:
                for eight in (False, True):
                    yield attention(method, tokens, batch, eight=eight)
                    torch.cuda.empty_cache()
    for each in () if only_attention else batches.split(","):
        for method, count in (("pariskv-plus", 100), ("clusterkv-plus", round(0.3 * HELD["clusterkv-plus"][1]))):
            yield gather(count, 1 << 14, batch=int(each)) | {"op": "fetch", "method": method, "rows": count}


def selects(batch: int, tokens: int) -> Iterator[dict[str, Any]]:
    """select() of both indexes."""
    yield kernels_pages.select_time("clusterkv-plus", tokens, batch)
    torch.cuda.empty_cache()
    chain = kernels_pariskv.Chain(batch, tokens)
    line = {"op": "select", "method": "pariskv-plus", "tokens": tokens, "batch": batch, "rows": kernels_pariskv.K}
    yield line | rates(chain.seconds("select"), chain.moved()["select"])
    del chain
    torch.cuda.empty_cache()


def attention(method: str, tokens: int, batch: int, *, eight: bool) -> dict[str, Any]:
    """flash_decode over sink, ring and rows in blocks."""
    regions, count = HELD[method]
    format, size = (E4M3(DIM, _DTYPE), 960) if eight else (RowFormat(DIM, _DTYPE), 1024)
    blocks, table = made(format, batch, tokens, size)
    slab, new = drawn(batch, HEADS, regions.held, 2, DIM), drawn(2, batch, HEADS, DIM)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    starts = lengths - regions.window - 3
    step = DecodeStep(drawn(batch, HEADS * GROUP, DIM), slab[:, :, :, 0], slab[:, :, :, 1], scale=DIM**-0.5)
    chosen = []
    for _ in range(_SETS):
        rows = torch.randint(regions.sink, tokens - regions.ring - 1, (batch, HEADS, count), device="cuda").sort(dim=2).values
        chosen.append(in_place.Selected(rows.int().contiguous(), None, table, size, None, format))
    every = [in_place.InPlace(regions, lengths, starts, (new[0], new[1]), one) for one in chosen]
    tickets = torch.zeros((batch, 1 + HEADS), dtype=torch.int32, device="cuda")
    mine = rows.int()[:1].contiguous()
    first = replace(chosen[-1], rows=mine, table=table[:1])
    keys, values = definitions.in_place(first, [list(blocks[: table.shape[1]])], step.keys[:1], step.values[:1], regions.held)
    copied = InSlab(regions, lengths[:1], starts[:1], (new[0, :1], new[1, :1]), mine >= 0)
    want = definition(replace(step, query=step.query[:1], keys=keys, values=values), copied).out
    error = agree(flash_decode(step, every[-1], tickets)[:1], want, "flash_decode over rows in blocks")
    seconds = replay_time([partial(flash_decode, step, one, tickets) for one in every])
    moved = batch * HEADS * (count * format.row_bytes + regions.held * 2 * DIM * _DTYPE.itemsize)
    line = {
        "op": "attention in blocks",
        "method": method,
        "tokens": tokens,
        "batch": batch,
        "rows": count,
        "held": regions.held,
    }
    return line | {"kv_dtype": "fp8" if eight else None, **rates(seconds, moved), "error": round(error, 5)}


def attention_to_all(setting: str) -> dict[str, Any]:
    """flash_decode over all rows of whole blocks of sequences: COUNTxTOKENS, or COUNTr of 16 to 4,096 tokens."""
    regions, size, format = Regions(4, 32, 16), 512, RowFormat(DIM, _DTYPE)
    count, tokens = (int(setting[:-1]), 0) if setting[-1] == "r" else map(int, setting.split("x"))
    drawn_ones = (-1000 * torch.rand(count, generator=torch.Generator().manual_seed(count)).log()).clamp(16, 4096)
    own = [tokens] * count if tokens else drawn_ones.int().tolist()
    width, blocks_each = bucket(max(own), 1 << 17), -(-max(own) // size)
    blocks = format.encode(drawn(min(count * blocks_each, 2048), HEADS, size, 2, DIM))
    slab, new = drawn(count, HEADS, regions.held, 2, DIM), drawn(2, count, HEADS, DIM)
    lengths = torch.tensor(own, dtype=torch.int32, device="cuda")
    starts = (lengths - regions.window - 3).clamp(min=regions.sink)
    step = DecodeStep(drawn(count, HEADS * GROUP, DIM), slab[:, :, :, 0], slab[:, :, :, 1], scale=DIM**-0.5)
    numbers = [torch.randint(len(blocks), (count, blocks_each), device="cuda") for _ in range(_SETS)]
    tables = [blocks.data_ptr() + number * blocks[0].nbytes for number in numbers]
    places = [InPlace(regions, lengths, starts, (new[0], new[1]), Every(width, table, size, format)) for table in tables]
    tickets = torch.zeros((count, 1 + HEADS), dtype=torch.int32, device="cuda")
    last = int(lengths.argmax())
    only = slice(last, last + 1)
    one = InPlace(
        regions, lengths[only], starts[only], (new[0, only], new[1, only]), replace(places[0].selected, table=tables[0][only])
    )
    listed = one.listed(HEADS)
    copied = InSlab(regions, one.lengths, one.starts, one.newest, listed.rows >= 0)
    got = flash_decode(step, places[0], tickets)
    of = [blocks[number] for number in numbers[0][last]]
    keys, values = definitions.in_place(listed, [of], step.keys[only], step.values[only], regions.held)
    error = agree(
        got[only],
        definition(replace(step, query=step.query[only], keys=keys, values=values), copied).out,
        "all rows of whole blocks",
    )
    seconds = replay_time([partial(flash_decode, step, each, tickets) for each in places])
    line = {"op": "attention to all rows of blocks", "sequences": setting, "batch": count, "tokens": sum(own)}
    return line | rates(seconds, sum(own) * HEADS * format.row_bytes) | {"error": round(error, 5)}


def made(format: RowFormat, batch: int, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Blocks of drawn rows, some of them alike, and the addresses of each sequence's."""
    each = -(-tokens // size)
    some = format.encode(drawn(64, HEADS, size, 2, DIM))
    blocks = torch.empty((batch * each, *some.shape[1:]), dtype=some.dtype, device="cuda")
    for part in blocks.split(len(some)):
        part.copy_(some[: len(part)])
    at = blocks.data_ptr() + torch.arange(batch * each, device="cuda") * blocks[0].nbytes
    return blocks, at.view(batch, each)


def drawn(*shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, device="cuda").to(_DTYPE)


if __name__ == "__main__":
    run_kernels(__doc__, lines, SHAPE, only_attention=False, batches="4,16,64", lengths="8192,32768,131072", most=1 << 21,
        whole="256x1100,64x1100,100r,30r,16x4000,8x1060,4x32768,1x131072",
    )  # fmt: skip
