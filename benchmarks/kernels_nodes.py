"""IceCache's search on the device: its kernels checked against their definitions, then a layer's step and its parts timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_decode import DIM, GROUP, HEADS, agree, replay_time
from benchmarks.kernels_pages import demand, eager_time
from benchmarks.script import Report, run_kernels
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import CacheError
from kvthaw.index.clusters import drawn
from kvthaw.index.nodes import NodeConfig, NodeIndex
from kvthaw.kernels import HAS_TRITON, nearest, node_digests, node_scores
from kvthaw.kernels.kmeans import grouped
from kvthaw.kernels.rerank import TILE
from kvthaw.kernels.stored_scores import definition, launch
from kvthaw.kernels.topk import run_length, topk
from kvthaw.kernels.unit_select import choose, launch_choice
from kvthaw.regions import Regions

ROWS = 176
"""Rows selected: what a budget of 256 leaves."""
SINK = 32
SCALE = DIM**-0.5
_COLD = 256 << 20  # bytes to pass over before digests may be read again: four times the L2 cache
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


def check(device: torch.device, tokens: int = 20_000) -> list[dict[str, Any]]:
    """Every kernel of the search against its definition, and all of them together. Raises CacheError where one differs."""
    lines = [check_build(device, tokens)]
    for policy in ("max", "mean"):
        index = made(tokens, 3, device, NodeConfig(policy=policy))
        query = queries(1, 3, device)[0]
        tables = (index.digests, index.stops, index.counts)
        scores, parts = node_scores.launch(query, *tables, scale=SCALE, reach=2.0)
        want = node_scores.definition(query, *tables, scale=SCALE, reach=2.0)
        known = want > -torch.inf
        error = agree(scores[known], want[known], "node scores", 1e-3)
        how: dict[str, Any] = {"first": SINK, "budget": index.width, "policy": policy}
        order = index.order
        assert order is not None
        rows, _ = launch_choice(scores, parts, index.stops, order, index.counts, **how)
        theirs, _ = choose(want, index.stops, order, index.counts, **how)
        nodes = other(rows, theirs)
        demand(nodes <= 64, f"the field of view: {nodes} rows of a head differ from the definition's")
        run = run_length(index.width, ROWS) or TILE
        table = index.context.store.table_on(device) if device.type == "cuda" else index.context.store.table()
        true = launch(query, table, index.context.store.block_size, rows, index.wanted, scale=SCALE, run=run)
        here = definition(query, table, index.context.store.block_size, rows)
        error_true = agree(true.scores[here > -torch.inf], here[here > -torch.inf], "true scores", 1e-3)
        best, counts = topk(true, rows, index.wanted, ROWS, 0, SCALE, policy)
        plain = type(true)(here)
        wanted, wanted_counts = topk(plain, rows, index.wanted, ROWS, 0, SCALE, policy)
        chosen = other(best, wanted)
        demand(torch.equal(counts, wanted_counts), "topk brings another number of rows")
        demand(chosen <= 2, f"select: {chosen} rows of a head differ from the definition's")
        again = index.select(query, ROWS)
        demand(other(again.rows, best) == 0, "select differs from its parts")
        names = {"node_error": error, "true_error": error_true}
        lines.append({"op": "check select", "policy": policy, **names, "field_rows_differ": nodes, "rows_differ": chosen})
    return lines


def check_build(device: torch.device, tokens: int) -> dict[str, Any]:
    """Parents and digests. Keys that are as near to two promoted ones, but for rounding, may go to either."""
    keys = random_keys(tokens, device)
    promoted = drawn(torch.arange(tokens, device=device), tokens // 20, torch.arange(HEADS, device=device)[:, None])
    labels, want = (f(keys, promoted) for f in (nearest.launch, nearest.definition))
    elsewhere = float((labels != want).float().mean())
    demand(elsewhere < 1e-3, f"{elsewhere:.2%} of the keys have another parent than the definition's")
    tables = grouped(labels, promoted.shape[1])
    (digests, order), (wanted, wanted_order) = (f(keys, *tables, 2) for f in (node_digests.launch, node_digests.definition))
    moved = float((order != wanted_order).float().mean())
    demand(moved < 1e-2, f"{moved:.2%} of the keys stand elsewhere than by the definition")
    error = agree(digests, wanted, "digests", 2e-2)  # an outlier as far from the mean as another may be that one
    return {"op": "check build", "other_parents": elsewhere, "other_places": moved, "digest_error": error}


def other(rows: Tensor, wanted: Tensor) -> int:
    """The most rows of a sequence and head that are not among those wanted."""
    pairs = zip(rows.flatten(0, 1), wanted.flatten(0, 1), strict=True)
    return max(int((~torch.isin(a, b)).sum()) for a, b in pairs)


def select_time(tokens: int, field: int, seqs: int = 1) -> dict[str, Any]:
    """A layer's select on digests that are not in the L2 cache, with queries of their own; its parts; building and appending."""
    device = torch.device("cuda")
    index = made(tokens, seqs, device, NodeConfig(field=field))
    count = max(1, math.ceil(_COLD / index.digests.nbytes))
    copies = [index]
    for _ in range(count - 1):
        copies.append(copy.copy(index))
        copies[-1].digests = index.digests.clone()
    asked = queries(max(32, count), seqs, device)
    pairs = [(copies[i % count], query) for i, query in enumerate(asked)]
    store, order = index.context.store, index.order
    assert order is not None
    table, run = store.table_on(device), run_length(index.width, ROWS) or TILE
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

    def us(calls: list[Callable[[], object]]) -> float:
        return round(replay_time(calls) * 1e6, 2)

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


def main(*, quick: bool = False, out: Path | None = None, commit: str | None = None) -> list[dict[str, Any]]:
    """Check, measure and print a JSON line a case; quick: fewer ones. Raises CacheError where a kernel is wrong."""
    if not torch.cuda.is_available() or not HAS_TRITON:
        raise CacheError("timing kernels needs a CUDA device and Triton; their definitions and checks run in the tests without")
    report = Report(out, commit, bench="kernels", method="icecache-digest-device", kv_heads=HEADS, group=GROUP, head_dim=DIM)
    with torch.inference_mode():
        for line in check(torch.device("cuda")):
            report(line)
        for tokens in (36864,) if quick else (36864, 1 << 17, 1 << 19):
            for field in (1024,) if quick else (512, 1024, 2048):
                report(select_time(tokens, field))
        if not quick:
            report(select_time(36864, 1024, 4))
    return report.lines


if __name__ == "__main__":
    run_kernels(main, __doc__)
