"""Bringing pages from the host: by layout (HND, NHD, token order), one by one, batched, and read by the device (PRKV, section
4.2, figure 7). Every way is checked for the rows that it brought before it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvthaw.cache.choice import BulkCopy
from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.uva_gather import uva_gather
from kvthaw.native import gather_rows
from kvthaw.regions import Regions
from lab.kernels import DIM, HEADS, demand, replay_time
from lab.script import run_kernels

PAGE = 32
_RUNS = 20
Layout = Literal["HND", "NHD"]
"""What lies together: the page of one head, or all heads of one place."""
Order = Literal["prkv", "scattered"]
"""Which tokens share a page: PRKV's (256 static tokens of any place first, the others in text order), or any (as in clusters)."""


@dataclass(slots=True)
class Stage:
    """A sequence's rows in token order and in that of pages, HND [H, P, PAGE, 2, D] and NHD [P, PAGE, 2, H, D], and a slab for the
    pages that are wanted: page i of head h goes to slots i PAGE on."""

    store: HostStore
    order: Tensor
    paged: dict[Layout, Tensor]
    slab: Slab
    staging: Tensor
    addresses: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return self.slab.data.device

    @property
    def out(self) -> Tensor:
        """Where pages go, [H, n, PAGE, 2, D]."""
        pool = self.slab.data[0, :, self.slab.pool_start :]
        return pool.view(pool.shape[0], -1, PAGE, *pool.shape[2:])


@dataclass(slots=True)
class Wanted:
    """Some pages of every head, and what each way must know of them, made beforehand as an index would."""

    listed: list[list[int]]
    rows: Tensor
    slots: Tensor
    rows_there: Tensor
    places_there: Tensor
    slots_there: Tensor
    pieces: Tensor
    whole: Tensor


def stage(
    tokens: int, wanted: int, order: Order, device: torch.device, *, heads: int = HEADS, dim: int = DIM, static: int = 256
) -> Stage:
    """Random rows of so many tokens, in all layouts; room for `wanted` pages a head."""
    pinned, dtype = device.type == "cuda", torch.bfloat16
    store = HostStore(1, heads, dim, dtype, pinned=pinned)
    for start in range(0, tokens, 8192):
        store.append(0, torch.randn(heads, min(8192, tokens - start), 2, dim).to(dtype))
    mixed = torch.stack([torch.randperm(tokens) for _ in range(heads)])
    if order == "prkv":
        mixed = torch.cat((mixed[:, :static], mixed[:, static:].sort(dim=1).values), dim=1)
    paged: dict[Layout, Tensor] = {"HND": rewritten(store, mixed, "HND"), "NHD": rewritten(store, mixed, "NHD")}
    slab = Slab(1, heads, dim, Regions(0, 1, 1), wanted * PAGE, dtype=dtype, device=device)
    staging = torch.empty((heads, wanted, PAGE, 2, dim), dtype=dtype, pin_memory=pinned)
    tables = {"rows": store.table.on_cpu(), "pages": torch.tensor([[paged["HND"].data_ptr()]])}
    return Stage(store, mixed, paged, slab, staging, {name: table.to(device) for name, table in tables.items()})


def rewritten(store: HostStore, order: Tensor, layout: Layout) -> Tensor:
    """Return a sequence's rows in the order [H, T] of pages; places behind the last token repeat it."""
    heads, tokens = order.shape
    pages = -(-tokens // PAGE)
    padded = torch.cat((order, order[:, -1:].expand(-1, pages * PAGE - tokens)), dim=1).int().contiguous()
    rows = torch.empty((heads, pages, PAGE, 2, store.head_dim), dtype=store.dtype, pin_memory=store.pinned)
    gather_rows(store.table.on_cpu()[:1], store.block_size, padded[None], rows.view(-1, 2, store.head_dim))
    if layout == "HND":
        return rows
    rows = rows.permute(1, 2, 3, 0, 4)
    return torch.empty(rows.shape, dtype=store.dtype, pin_memory=store.pinned).copy_(rows)


def draw(of: Stage) -> Wanted:
    """Other pages for every head."""
    heads, count = of.staging.shape[:2]
    total, device = of.order.shape[1] // PAGE, of.device
    pages = torch.stack([torch.randperm(total)[:count] for _ in range(heads)])
    places = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    rows, slots = of.order.gather(1, places).int()[None], torch.arange(count * PAGE, dtype=torch.int32).expand(1, heads, -1)
    head = torch.arange(heads)[:, None]
    piece = (places[:, :, None] * 2 + torch.arange(2)) * heads + head[:, :, None]
    rows_there, places_there, slots_there = (t.to(device).contiguous() for t in (rows, places.int()[None], slots))
    whole = (head * of.paged["HND"].shape[1] + pages).flatten()
    there = rows_there, places_there, slots_there
    return Wanted(pages.tolist(), rows.contiguous(), slots.contiguous(), *there, piece.flatten(), whole)


def one_by_one(of: Stage, layout: Layout, want: Wanted) -> None:
    """A copy for each page of each head, as pages lie; torch makes one piece of a page in NHD first."""
    data, out = of.paged[layout], of.out
    for head, pages in enumerate(want.listed):
        for i, page in enumerate(pages):
            source = data[head, page] if layout == "HND" else data[page, :, :, head]
            out[head, i].copy_(source, non_blocking=True)


def batched(of: Stage, layout: Layout, want: Wanted) -> None:
    """All pages into one pinned buffer by the host's threads, whole (HND) or a key or value at a time (NHD), then one copy."""
    data = of.paged[layout]
    if layout == "HND":
        torch.index_select(data.view(-1, *of.staging.shape[2:]), 0, want.whole, out=of.staging.flatten(0, 1))
    else:
        torch.index_select(data.view(-1, data.shape[-1]), 0, want.pieces, out=of.staging.view(-1, data.shape[-1]))
    of.out.copy_(of.staging, non_blocking=True)


def bulk(of: Stage, transfer: BulkCopy, want: Wanted) -> None:
    """kvthaw's BulkCopy out of rows in token order."""
    transfer.fetch(of.store, of.slab, want.rows, want.slots)


def read_by_device(of: Stage, layout: Literal["rows", "pages"], want: Wanted) -> None:
    """kvthaw's UvaGather: a kernel reads rows in token order, or the same rows page by page."""
    block_size = of.store.block_size if layout == "rows" else of.paged["HND"].shape[1] * PAGE
    fetch = want.rows_there if layout == "rows" else want.places_there
    uva_gather(of.addresses[layout], block_size, of.slab.data, fetch, want.slots_there, of.slab.pool_start)


def ways(of: Stage) -> dict[str, Callable[[Wanted], None]]:
    """Every way to bring what is wanted, by name."""
    found: dict[str, Callable[[Wanted], None]] = {
        "one by one, NHD": partial(one_by_one, of, "NHD"),
        "one by one, HND": partial(one_by_one, of, "HND"),
        "batched, NHD": partial(batched, of, "NHD"),
        "batched, HND": partial(batched, of, "HND"),
        "bulk, token order": partial(bulk, of, BulkCopy()),
    }
    if HAS_TRITON:
        found |= {"device reads, token order": partial(read_by_device, of, "rows")}
        found |= {"device reads, HND": partial(read_by_device, of, "pages")}
    return found


def check(of: Stage) -> None:
    """Every way beside the rows that the token-order store has. Raises CacheError where one brought others."""
    heads = torch.arange(of.order.shape[0])[:, None]
    stored = of.store.read(0, 0, of.order.shape[1])
    rows, tokens = stored[heads, of.order], of.order.shape[1]
    for layout, paged in of.paged.items():
        there = paged if layout == "HND" else paged.permute(3, 0, 1, 2, 4)
        demand(torch.equal(there.flatten(1, 2)[:, :tokens], rows), f"the pages in {layout} hold other rows than the store")
    for name, bring in ways(of).items():
        want = draw(of)
        of.slab.data.fill_(torch.nan)
        bring(want)
        wanted = stored[heads, want.rows[0].long()].unflatten(1, (-1, PAGE))
        demand(torch.equal(of.out.cpu(), wanted), f"{name} brought other rows than it was asked for")


def wall_time(bring: Callable[[Wanted], None], wanted: Sequence[Wanted]) -> float:
    """Seconds from the call until the rows are there, the median."""
    times, warm = [], wanted[:2]
    for want in (*warm, *wanted):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        bring(want)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[len(warm) :])


def transfers(tokens: int, pages: int, order: Order) -> Iterator[dict[str, Any]]:
    """A line a way: seconds until the rows are there and, where the device works alone, in a captured graph. Then what layout and
    batching bring."""
    of = stage(tokens, pages, order, torch.device("cuda"))
    check(of)
    wanted = [draw(of) for _ in range(_RUNS)]
    about = {"op": "transfer", "order": order, "tokens": tokens, "pages": pages, "page_bytes": PAGE * of.store.row_bytes}
    took = {}
    for name, bring in ways(of).items():
        took[name] = wall_time(bring, wanted)
        moved = of.staging.nbytes
        line = {**about, "how": name, "ms": round(1e3 * took[name], 4), "gbps": round(moved / took[name] / 1e9, 2)}
        if name.startswith("device"):
            seconds = replay_time([partial(bring, want) for want in wanted])
            line |= {"device_ms": round(1e3 * seconds, 4), "device_gbps": round(moved / seconds / 1e9, 2)}
        yield line
    gains = {
        "HND, one by one": took["one by one, NHD"] / took["one by one, HND"],
        "HND, batched": took["batched, NHD"] / took["batched, HND"],
        "batching, NHD": took["one by one, NHD"] / took["batched, NHD"],
        "batching, HND": took["one by one, HND"] / took["batched, HND"],
        "page order, read by the device": took["device reads, token order"] / took["device reads, HND"],
    }
    yield {**about, "op": "gains", **{name: round(gain, 2) for name, gain in gains.items()}}


def rewriting(tokens: int) -> Iterator[dict[str, Any]]:
    """The host's rewriting of a layer, and a fetch by the device meanwhile."""
    of = stage(tokens, 32, "prkv", torch.device("cuda"))
    bring, want = partial(read_by_device, of, "rows"), [draw(of) for _ in range(_RUNS)]
    alone = wall_time(bring, want)
    with ThreadPoolExecutor(1) as thread:
        for layout, paged in of.paged.items():
            begin = time.perf_counter()
            coming, beside = thread.submit(rewritten, of.store, of.order, layout), []
            while not coming.done():
                beside.append(wall_time(bring, want[:1]))
            made, seconds = coming.result(), time.perf_counter() - begin
            demand(torch.equal(made, paged), f"the pages in {layout} came to other rows")
            line: dict[str, Any] = {"op": "rewrite", "layout": layout, "tokens": tokens, "ms": round(1e3 * seconds, 2)}
            line |= {"gbps": round(2 * paged.nbytes / seconds / 1e9, 1), "fetch_ms": round(1e3 * alone, 4)}
            yield line | {"fetch_beside_ms": round(1e3 * statistics.median(beside), 4) if beside else None}


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    orders: tuple[Order, ...] = ("prkv", "scattered")
    for pages in (32,) if quick else (10, 32):
        for order in orders:
            yield from transfers(32768, pages, order)
    for tokens in (32768,) if quick else (32768, 131072):
        yield from rewriting(tokens)


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "kernels", "kv_heads": HEADS, "head_dim": DIM})
