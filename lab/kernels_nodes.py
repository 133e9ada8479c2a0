"""IceCache's search on the device: a layer's step and its parts, checked against their definitions and timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.kernels.rerank import TILE
from kvthaw.kernels.topk import run_length, topk
from kvthaw.kernels.unit_select import choose, launch_choice
from kvthaw.regions import Regions
from kvthaw_baselines.index.nodes import NodeConfig, NodeIndex
from kvthaw_baselines.kernels import node_scores
from kvthaw_baselines.kernels.stored_scores import definition, launch
from lab.kernels import DIM, GROUP, HEADS, SHAPE, agree, copies, demand, differing, eager_time, micros, replay_time
from lab.script import run_kernels

ROWS = 176
"""Rows selected: what a budget of 256 leaves."""
SINK = 32
SCALE = DIM**-0.5
_PIECE = 8192


def made(tokens: int, seqs: int, device: torch.device, config: NodeConfig) -> NodeIndex:
    """An index over sequences of random keys, each shorter than the one before, with 16 tokens behind each prompt."""
    store = HostStore(seqs, HEADS, DIM, torch.bfloat16, pinned=device.type == "cuda")
    sizes = (0, HEADS * GROUP, HEADS, DIM, torch.bfloat16, device)
    index = NodeIndex(IndexContext(*sizes, store, Regions(SINK, 32, 16), SCALE, rows=ROWS), config)
    index.make_room(seqs, tokens)
    for seq in range(seqs):
        length = tokens - seq * (tokens // 18)
        keys = random_keys(length, device)
        for at in range(0, length, _PIECE):
            piece = keys[:, at : at + _PIECE]
            store.append(seq, torch.stack((piece, piece), dim=2))
        prompt = keys[:, SINK : length - 16]
        index.build(seq, SINK, prompt, prompt, torch.empty(0, device=device))
        index.append([seq], keys[None, :, length - 16 :], keys[None, :, length - 16 :], None)
    index.join()
    return index


def random_keys(tokens: int, device: torch.device) -> Tensor:
    """[HEADS, tokens, DIM] around 256 centres a head."""
    centres = 1.5 * torch.randn(HEADS, 256, DIM, device=device)
    which = torch.randint(256, (HEADS, tokens, 1), device=device).expand(-1, -1, DIM)
    return (centres.gather(1, which) + torch.randn(HEADS, tokens, DIM, device=device)).bfloat16()


def queries(count: int, seqs: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(seqs, HEADS * GROUP, DIM, device=device).bfloat16() for _ in range(count)]


def check(index: NodeIndex, query: Tensor, scores: Tensor, field: Tensor, true: Tensor) -> None:
    """Compare what a query's kernels left, and select, with their definitions. Raises CacheError where they differ."""
    store, order = index.context.store, index.order
    assert order is not None
    want = node_scores.definition(query, index.digests, index.stops, index.counts, scale=SCALE, reach=2.0)
    agree(scores[want > -torch.inf], want[want > -torch.inf], "node scores", 1e-3)
    wider, _ = choose(want, index.stops, order, index.counts, first=SINK, budget=index.width, policy="max")
    demand((other := differing(field, wider)) <= 64, f"the field of view: {other} rows of a head differ from the definition's")
    here = definition(query, store.table.on(query.device), store.block_size, field)
    agree(true[here > -torch.inf], here[here > -torch.inf], "true scores", 1e-3)
    best, counts = topk(here, field, index.wanted, ROWS, 0, SCALE, "max")
    found = index.select(query, ROWS)
    demand(torch.equal(found.counts, counts), "select brings another number of rows")
    demand((other := differing(found.rows, best)) <= 2, f"select: {other} rows of a head differ from the definition's")


def select_time(tokens: int, field: int, seqs: int = 1) -> dict[str, Any]:
    """A layer's select on digests that are not in the L2 cache, with queries of their own; its parts; building and appending."""
    device = torch.device("cuda")
    index = made(tokens, seqs, device, NodeConfig(field=field))
    twins = [index]
    for _ in range(1, copies(index.digests.nbytes)):
        twins.append(copy.copy(index))
        twins[-1].tables = copy.copy(index.tables)
        twins[-1].tables["digests"] = index.digests.clone()
    asked = queries(max(32, len(twins)), seqs, device)
    pairs = [(twins[i % len(twins)], query) for i, query in enumerate(asked)]
    store, order = index.context.store, index.order
    assert order is not None
    table, run = store.table.on(device), run_length(index.width, ROWS) or TILE
    how: dict[str, Any] = {"first": SINK, "budget": index.width, "policy": "max"}

    def scored(one: NodeIndex, query: Tensor) -> tuple[Tensor, Tensor]:
        return node_scores.launch(query, one.digests, one.stops, one.counts, scale=SCALE, reach=2.0)

    kept = [scored(*pair) for pair in pairs]
    fields = [launch_choice(*found, index.stops, order, index.counts, **how)[0] for found in kept]
    trues = [
        launch(q, table, store.block_size, rows, index.wanted, scale=SCALE, run=run)
        for (_, q), rows in zip(pairs, fields, strict=True)
    ]
    chosen = list(zip(trues, fields, strict=True))
    check(index, asked[0], kept[0][0], fields[0], trues[0].scores)

    def us(calls: list[Callable[[], object]]) -> float:
        return micros(replay_time(calls))

    parts = {
        "scores_us": us([partial(scored, *pair) for pair in pairs]),
        "choice_us": us([partial(launch_choice, *found, index.stops, order, index.counts, **how) for found in kept]),
        "read_us": us(
            [
                partial(launch, q, table, store.block_size, rows, index.wanted, scale=SCALE, run=run)
                for (_, q), rows in zip(pairs, fields, strict=True)
            ]
        ),
        "topk_us": us([partial(topk, found, rows, index.wanted, ROWS, 0, SCALE, "max") for found, rows in chosen]),
    }
    whole = us([partial(one.select, query, ROWS) for one, query in pairs])
    read = int(index.wanted.sum()) * HEADS * DIM * 2
    line = {"op": "select", "tokens": tokens, "batch": seqs, "field": index.width, "rows": ROWS, "nodes": index.seqs[0].units}
    line |= {"us": whole, **parts, "bus_bytes": read, "bus_gbps": round(read / parts["read_us"] / 1e3, 1)}
    keys = random_keys(tokens - SINK, device)

    def build() -> None:
        index.build(0, SINK, keys, keys, keys)
        index.join()

    line["build_ms"] = round(eager_time(build, 3) * 1e3, 2)
    few = keys[None, :, :16]
    line["append_ms"] = round(eager_time(lambda: index.append([0], few, few, None), 3) * 1e3, 3)
    return line


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for tokens in (36864,) if quick else (36864, 1 << 17, 1 << 19):
        for field in (1024,) if quick else (512, 1024, 2048):
            yield select_time(tokens, field)
    if not quick:
        yield select_time(36864, 1024, 4)


if __name__ == "__main__":
    run_kernels(__doc__, lines, {**SHAPE, "method": "icecache-digest-device"})
