"""What DCI-trees find of a query's best keys, at which effort: of the model that ships, reading its book, and of drawn keys.

usage: python3 -m lab.tree_search [--length 36864] [--rows 176] [--out FILE] [--commit HASH]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.engine.hf.model import load_shipped
from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.icecache import PRESETS
from kvthaw.methods.icecache_digest import SETTINGS
from kvthaw.regions import Regions
from lab.kernels_tree import keys as drawn_keys
from lab.passages import text_passage
from lab.script import run_kernels

TREES: dict[str, dict[str, Any]] = {
    "icecache": PRESETS["paper"],
    "icecache:query_retrieve_share=1.0": {"query_retrieve_share": 1.0},
    "icecache:build_beam=0": {"build_beam": 0},
    "icecache:preset=code": PRESETS["code"],
    "icecache-digest": SETTINGS,
}
LAST = 4
"""Queries a query head: the last ones of every 16 positions."""


def shipped(length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield queries [Hq, n, D] and keys [H, length, D] of each layer of the model that ships."""
    from transformers import AttentionInterface

    model, tokenizer = load_shipped()
    found = []

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, scaling: float, **more: Any) -> tuple[Tensor, None]:
        found.append((q[0, :, -16 * LAST :: 16].clone(), k[0].bfloat16()))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("tree_search", attend)
    model.config._attn_implementation = "tree_search"
    with torch.no_grad():
        model.model(torch.tensor([text_passage(tokenizer, length=length, steps=0, seed=0).prompt]), use_cache=False)
    yield from found


def drawn(length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield clustered keys of 8 KV heads, 128 dimensions, and queries near some of them."""
    generator = torch.Generator().manual_seed(length)
    keys = drawn_keys(length, generator)
    near = torch.randint(length, (LAST,), generator=generator)
    yield keys[:, near].float() + torch.randn(*keys[:, near].shape, generator=generator), keys


def search(layer: int, queries: Tensor, keys: Tensor, rows: int, options: dict[str, Any]) -> dict[str, float]:
    """Measure one tree a KV head on one thread: seconds of it to build, and means over the queries."""
    (heads, length, dim), group = keys.shape, len(queries) // len(keys)
    store, regions = HostStore(1, heads, dim, keys.dtype), Regions(32, 32, 16)
    store.append(0, torch.stack((keys, keys), 2))
    context = IndexContext(layer, heads, heads, dim, keys.dtype, torch.device("cpu"), store, regions, dim**-0.5)
    index = TreeIndex(context, TreeConfig(**options | {"unit": "token"}), threads=1)
    begin = time.thread_time()
    index.build(0, regions.sink, torch.empty(heads, length - regions.sink - regions.window, 0))
    means = {"build_us_a_key": 1e6 * (time.thread_time() - begin) / heads / length, "search_ms": 0.0}
    means |= {"recall_10": 0.0, "recall_100": 0.0, "mass": 0.0}
    held = keys[:, regions.sink : length - regions.window].float()
    asked = queries.float().view(heads, group, -1, dim).flatten(1, 2)
    for query in asked.unbind(1):
        begin = time.thread_time()
        chosen = index.select(query[None], rows).rows
        means["search_ms"] += 1e3 * (time.thread_time() - begin)
        scores = (held @ query[..., None])[..., 0]
        places = torch.where(
            chosen[0] < 0, scores.shape[1], chosen[0] - regions.sink
        ).long()  # where there is no row: past the end
        got = torch.zeros(heads, scores.shape[1] + 1, dtype=torch.bool).scatter(1, places, True)[:, :-1]
        for most in (10, 100):
            means[f"recall_{most}"] += float(got.gather(1, scores.topk(most).indices).float().mean(1).sum())
        share = (scores * dim**-0.5).softmax(1)
        means["mass"] += float(((share * got).sum(1) / share.topk(rows).values.sum(1)).sum())
    count = asked.shape[1] * heads
    products = index.forest.products() / count
    means = {name: value if name == "build_us_a_key" else value / count for name, value in means.items()}
    return {**means, "products": products, "products_share": products / held.shape[1]}


def lines(*, quick: bool, length: int, rows: int) -> Iterator[dict[str, Any]]:
    """Search; a line a source of keys, length and tree. quick: 1,024 keys alone."""
    lengths = [1024] if quick else [*(n for n in (4096, 16384) if n < length), length]
    for tokens in lengths:
        for source in (shipped, drawn):
            layers = list(source(tokens))
            for method, options in TREES.items():
                each = [search(layer, q, k, rows, options) for layer, (q, k) in enumerate(layers)]
                means = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
                yield {"rows": rows, "keys": source.__name__, "length": tokens, "method": method, **means}


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "tree_search"}, gpu=False, length=36864, rows=176)
