"""Searching the DCI-trees of a model's layers against a flat scan of all keys by torch, on the same threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.icecache import PRESETS
from kvthaw.methods.icecache_digest import SETTINGS
from kvthaw.native import cores
from kvthaw.regions import Regions
from lab.kernels import DIM, GROUP, HEADS
from lab.script import run_kernels

METHODS: dict[str, dict[str, Any]] = {
    "icecache": {},
    "icecache:preset=code": PRESETS["code"],
    "icecache-digest": SETTINGS,
}
APPENDED = 16
"""Keys of an append."""
ROUNDS = 10
"""Queries a layer, the first half of them one after the other."""
LEFT = 5 * APPENDED
"""Keys that building leaves for them."""


def keys(length: int, generator: torch.Generator) -> Tensor:
    """[HEADS, length, DIM] bfloat16: clusters of very different sizes, as in a text, half of the dims turned by position."""
    centres = torch.randn(HEADS, 256, DIM, generator=generator) * 1.5
    share = 1 / torch.arange(1, 257).float()
    which = torch.multinomial(share.expand(HEADS, -1), length, replacement=True, generator=generator)
    made = centres.gather(1, which[..., None].expand(-1, -1, DIM)) + torch.randn(HEADS, length, DIM, generator=generator)
    angle = torch.arange(length)[:, None] * 10_000 ** -(torch.arange(DIM // 4) / (DIM // 4))
    x, y, rest = made.split((DIM // 4, DIM // 4, DIM // 2), dim=2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((x * cos - y * sin, x * sin + y * cos, rest), dim=2).bfloat16()


def filled(length: int, layers: int) -> list[HostStore]:
    """Stores of as many layers, each with keys of its own."""
    generator = torch.Generator().manual_seed(length)
    stores = []
    for _ in range(layers):
        stores.append(HostStore(1, HEADS, DIM, torch.bfloat16))
        k = keys(length, generator)
        stores[-1].append(0, torch.stack((k, k), dim=2))
    return stores


def measure(stores: list[HostStore], budget: int, threads: int, config: TreeConfig) -> dict[str, float]:
    """Medians over layers with keys of their own and queries that come once, so that no cache keeps them: milliseconds a layer.
    rested_ms: of searches before which the caller waits, as a step does for the device; head_ms: the mean of a query head;
    longest_ms: of the longest piece of a search of a layer."""
    length, layers = stores[0].length(0), len(stores)
    indices, build = [], []
    for layer, store in enumerate(stores):
        sizes = (layer, HEADS * GROUP, HEADS, DIM, store.dtype, torch.device("cpu"))
        index = TreeIndex(IndexContext(*sizes, store, Regions(32, 32, 16), DIM**-0.5), config, threads=threads)
        begin = time.perf_counter()
        index.build(0, 32, torch.empty(HEADS, length - 32 - LEFT, 0))
        build.append(time.perf_counter() - begin)
        indices.append(index)
    query = torch.randn(ROUNDS, layers, 1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1)) * 2
    scanned = [store.read(0, 32, length)[:, :, 0].float().contiguous() for store in stores]

    def flat(turn: int, i: int) -> Tensor:
        scores = query[turn, i].view(HEADS, GROUP, DIM) @ scanned[i].mT
        return 32 + torch.topk(scores, budget).indices

    def tree(turn: int, i: int) -> Tensor:
        return indices[i].select(query[turn, i], budget).rows

    def rested(turn: int, i: int) -> Tensor:
        return tree(-1 - turn, i)  # other queries than those just asked

    def append(turn: int, i: int) -> Tensor:
        more = torch.empty(1, HEADS, APPENDED, 0)
        indices[i].append([0], more)
        return more

    found = {"build_ms": 1e3 * statistics.median(build), "tree_ms": _median(tree, layers)}
    each = [
        sum(of) * 1e-6 / (ROUNDS // 2 * layers) for of in zip(*(index.forest.search_ns() for index in indices), strict=True)
    ]
    found |= {"head_ms": each[0] / (HEADS * GROUP), "longest_ms": each[1]}
    found["rested_ms"] = _median(rested, layers, rest=2e-4)
    return found | {"flat_ms": _median(flat, layers), "append_ms": _median(append, layers, rounds=LEFT // APPENDED)}


def _median(call: Callable[[int, int], Tensor], layers: int, rounds: int = ROUNDS // 2, rest: float = 0.0) -> float:
    """rest: seconds before each call in which the caller waits."""
    times = []
    for turn in range(rounds):
        for i in range(layers):
            awake = time.perf_counter() + rest
            while time.perf_counter() < awake:
                pass
            begin = time.perf_counter()
            call(turn, i)
            times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def lines(*, quick: bool, length: int, budget: int, threads: str, layers: int, method: str = "") -> Iterator[dict[str, Any]]:
    """Build, search and append; a line a setting. quick: at most 4096 keys and two layers. length: keys a KV head; budget: rows a
    KV head; threads: numbers separated by commas, the fewest first, since idle ones take from those that work; 0 for one a core;
    layers: with keys of their own; method: one of METHODS, all unless given."""
    if quick:
        length, layers = min(length, 4096), min(layers, 2)
    before, stores = torch.get_num_threads(), filled(length, layers)
    try:
        for count in (int(one) or cores() for one in threads.split(",")):
            torch.set_num_threads(count)
            for name, settings in METHODS.items():
                if method and name != method:
                    continue
                times = measure(stores, budget, count, TreeConfig(**settings))
                sizes = {"length": length, "budget": budget, "threads": count}
                yield {**sizes, "method": name, **times, "speedup": times["flat_ms"] / times["tree_ms"]}
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "tree"}, gpu=False, length=36864, budget=176, threads="0", layers=8, method="")
