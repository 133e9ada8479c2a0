"""Times of single parts on a device, of shapes with random weights: prompts in a pipeline, estimation, layouts, kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.chunks import CHUNK
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.machine import now, where
from kvthaw.kernels import collide, encode, rerank
from kvthaw.kernels.bucket_topk import bucket_topk
from kvthaw.kernels.srht import make_rotation
from kvthaw.kernels.tiers import tiers
from kvthaw.kernels.uva_gather import uva_gather
from lab.bench.shapes import build, random_ids
from lab.reproduce.lab import BUDGET, Lab
from lab.reproduce.plans import QUICK

Found = dict[str, dict[str, float]]
Call = Callable[[], Any]


def pipelined(lab: Lab, rows: Sequence[str], shape: str, length: int) -> tuple[Found, str]:
    """Return seconds of a prompt.

    The first row offloads and indexes after the prefill. The second does so during the prefill, in one pass. The third does so in
    chunks, as `attach` splits a prompt that is longer than CHUNK.
    """
    device, size = where()[0], QUICK if lab.quick else length
    lab.bench.prepare("tiny" if lab.quick else shape)
    model, found = lab.bench.model, Found()
    ids = random_ids(model, 1, size, seed=0)[0].tolist()
    for _ in range(2):  # the first pass compiles kernels and takes the host memory
        for row, method, chunk in zip(rows, ("full", "icecache", "icecache"), (size, size, CHUNK), strict=True):
            begin = now(device)
            cache = Cache(model, method, budget=256, host_bytes=lab.host_bytes)
            prefill(model, cache, ids, chunk=chunk)
            middle = now(device)
            indexed = cache.fork("icecache", budget=256) if method == "full" else cache
            indexed.wait()
            found[row] = {"prefill": middle - begin, "rest": now(device) - middle, "total": now(device) - begin}
            del cache, indexed
    return found, f"shape {'tiny' if lab.quick else shape} with random weights, {size:,} tokens"


def estimates(lab: Lab, rows: Sequence[str], shape: str, length: int) -> tuple[Found, str]:
    """Return microseconds that one layer's estimation takes, and full attention over all keys (the first row); on a GPU both are
    replayed from a CUDA graph, as in a step."""
    device, size = where()[0], QUICK if lab.quick else length
    model = build("tiny" if lab.quick else shape, device, layers=None if lab.quick else 1)
    config = model.config
    ids = random_ids(model, 1, size, seed=0)[0].tolist()
    query = torch.randn(1, config.num_attention_heads, config.head_dim, device=device, dtype=model.dtype)
    keys = torch.randn(1, config.num_key_value_heads, size, config.head_dim, device=device, dtype=model.dtype)
    found = {rows[0]: {"us": _time(_graphed(partial(attend, query[:, :, None], keys, keys, enable_gqa=True), device), device)}}
    for row in rows[1:]:
        base = Cache(model, row, budget=BUDGET if lab.quick else 1024, dense_layers=0)
        prefill(model, base, ids)
        base.wait()
        layer = base.kv.offloaded[0]
        assert layer.retriever is not None and layer.plan is not None
        index, count = layer.retriever.index, layer.plan.rows
        found[row] = {"us": _time(_graphed(partial(index.select, query, count), device), device)}
    for of in found.values():
        of["ratio"] = of["us"] / found[rows[0]]["us"]
    how = "captured" if device.type == "cuda" else "eager"
    return found, f"one layer of {'tiny' if lab.quick else shape}, {size:,} keys, {how}"


def layouts(lab: Lab, rows: Sequence[str], heads: int, kv_heads: int, dim: int) -> tuple[Found, str]:
    """Return milliseconds of torch's attention over keys and values laid out as tokens of heads (NHD) and heads of tokens (HND)."""
    device, found = where()[0], Found()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for row in rows:
        size = int(row) // 256 if lab.quick else int(row)
        wide = torch.randn(2, 1, size, kv_heads, dim, device=device, dtype=dtype)
        for name, (k, v) in (("NHD", wide.transpose(2, 3)), ("HND", wide.transpose(2, 3).contiguous())):
            for phase, tokens in (("prefill", size), ("decode", 1)):
                q = torch.randn(1, heads, tokens, dim, device=device, dtype=dtype)
                call = partial(attend, q, k, v, is_causal=tokens > 1, enable_gqa=True)
                found.setdefault(row, {})[f"{phase}-{name}"] = _time(call, device) / 1000
    return found, f"torch's attention, {heads} query and {kv_heads} KV heads of {dim}" + ", 1/256 of the keys" * lab.quick


def kernels(lab: Lab, rows: Sequence[str], sizes: dict[str, int]) -> tuple[Found, str]:
    """Return how many times as fast as torch ParisKV's kernels are, called eagerly, with 8 KV heads of 4 query heads of 128."""
    device, found = where()[0], Found({row: {} for row in rows})
    for column, asked in sizes.items():
        size = -(-asked // (256 if lab.quick else 1) // collide.CHUNK) * collide.CHUNK
        for row, (ours, torchs) in _pairs(device, size).items():
            found[row][column] = _time(torchs, device) / _time(ours, device)
    return found, "random keys, eager" + ", torch on both sides, for there is no GPU" * (device.type == "cpu")


def _pairs(device: torch.device, size: int, heads: int = 8, dim: int = 128, k: int = 100) -> dict[str, tuple[Call, Call]]:
    """Return, a step, our call and torch's."""
    dtype, query = torch.bfloat16, torch.randn(1, 4 * heads, dim, device=device)
    keys = torch.randn(heads, size, dim, device=device)
    rotation, quantizer = make_rotation(dim, 0, device=device), encode.make_quantizer(device)
    ids, codes, weights = encode.definition(keys[None], rotation, quantizer)
    ids = ids.contiguous()
    counted = torch.zeros((*ids.shape[:3], 256), dtype=torch.int32, device=device)
    counted.scatter_add_(3, ids.long(), torch.ones_like(ids, dtype=torch.int32))
    now_ = encode.Summaries(ids, codes, weights, counted)
    lengths, wanted = (torch.tensor([n], dtype=torch.int32, device=device) for n in (size, max(k, size // 10)))
    limits = torch.tensor([[size * i // 30 for i in range(1, 7)]], dtype=torch.int32, device=device)
    totals = torch.zeros((1, heads, collide.BINS), dtype=torch.int32, device=device)
    rotated, table = tiers(query, rotation, counted, limits, totals, mean=False)
    scores = collide.collide(table, ids, lengths, totals, 0)
    width = -(-int(wanted) // rerank.TILE) * rerank.TILE
    candidates, _ = bucket_topk(scores, lengths, wanted, width)
    plain = scores if isinstance(scores, Tensor) else scores.scores
    exact = torch.topk(plain.int(), int(wanted), dim=2).indices.int()
    pairs: dict[str, tuple[Call, Call]] = {
        "collision": (
            lambda: collide.collide(table, ids, lengths, totals.zero_(), 0),
            partial(collide.definition, table, ids, 0),
        ),
        "bucket_topk": (
            partial(bucket_topk, scores, lengths, wanted, width),
            lambda: torch.topk(plain.int(), int(wanted), dim=2),
        ),
        "rerank": (
            partial(rerank.rerank, rotated, now_, candidates, wanted, quantizer, dim**-0.5),
            partial(rerank.definition, rotated, now_, exact, quantizer),
        ),
    }
    if device.type == "cuda":
        pairs["fetch"] = _fetches(device, size, heads, dim, k, dtype)
    return pairs


def _fetches(device: torch.device, size: int, heads: int, dim: int, k: int, dtype: torch.dtype) -> tuple[Call, Call]:
    store = torch.zeros((heads, size, 2, dim), dtype=dtype).pin_memory()
    table, slab = (
        torch.tensor([[store.data_ptr()]], device=device),
        torch.empty((1, heads, k, 2, dim), dtype=dtype, device=device),
    )
    rows = torch.randint(0, size, (1, heads, k), dtype=torch.int32)
    slots = torch.arange(k, dtype=torch.int32, device=device).expand(1, heads, k).contiguous()
    here, head = rows.to(device), torch.arange(heads)[:, None]
    return partial(uva_gather, table, size, slab, here, slots, 0), lambda: store[head, rows[0].long()].to(device)


def _graphed(call: Call, device: torch.device) -> Call:
    """Return the call as a CUDA graph that replays it; on a CPU, the call."""
    if device.type != "cuda":
        return call
    for _ in range(3):  # kernels are compiled and tuned
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _time(call: Call, device: torch.device, times: int = 21) -> float:
    """Return the median microseconds of a call."""
    taken = []
    for number in range(3 if device.type == "cpu" else times):
        begin = now(device)
        call()
        taken.append(now(device) - begin)
        if number == 1 and math.fsum(taken) > 30:
            break
    return 1e6 * sorted(taken[1:] or taken)[len(taken[1:]) // 2]
