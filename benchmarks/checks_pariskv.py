"""ParisKV's kernels on a GPU, each against its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_pages import demand
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.index.codes import CodesIndex, Policy
from kvthaw.index.ratios import Ratios
from kvthaw.kernels import bucket_topk as bucket
from kvthaw.kernels import collide as collision
from kvthaw.kernels import encode as encoding
from kvthaw.kernels import planes as rounding
from kvthaw.kernels import query as turning
from kvthaw.kernels import rerank as reranking
from kvthaw.kernels import signs as signing
from kvthaw.kernels import tiers as tiering
from kvthaw.kernels import topk as choosing
from kvthaw.regions import Regions

HEADS, GROUP, DIM, SINK, WINDOW, BUFFER, K = 8, 4, 128, 128, 256, 512, 100
CHECKED: tuple[tuple[Policy, int, int], ...] = (
    ("max", 4, 128),
    ("mean", 4, 128),
    ("mean_query", 4, 128),
    ("max", 1, 64),
    ("max", 8, 96),
    ("mean", 2, 256),
)
"""Policy, query heads a KV head, head_dim."""


def make(
    batch: int,
    tokens: int,
    policy: Policy = "max",
    *,
    group: int = GROUP,
    dim: int = DIM,
    ragged: bool = False,
    paper: bool = False,
) -> CodesIndex:
    """An index of random keys; ragged: of sequences that differ in length; paper: with its tiers of votes and keys as they are."""
    device = torch.device("cuda")
    store = HostStore(batch, HEADS, dim, torch.bfloat16)
    sizes = (0, HEADS * group, HEADS, dim, torch.bfloat16, device)
    shape = IndexContext(*sizes, store, Regions(SINK, WINDOW, BUFFER), dim**-0.5)
    index = CodesIndex(shape, policy=policy, graded=not paper, centre=not paper)
    index._reserve(batch, tokens)
    for seq in range(batch):
        n = tokens - seq * 777 if ragged else tokens
        keys = torch.randn(HEADS, n, dim, device=device, dtype=torch.bfloat16)
        index.build(seq, SINK, keys, keys, keys[:, :0])
    return index


def queries(batch: int, group: int = GROUP, dim: int = DIM) -> Tensor:
    return torch.randn(batch, HEADS * group, dim, device="cuda").bfloat16() * 2


def check(policy: Policy, tokens: int = 40_000, *, group: int = GROUP, dim: int = DIM) -> dict[str, Any]:
    """Every kernel against its definition, on two sequences of different lengths; figures of how far they differ."""
    index, query, scale = (
        make(2, tokens, policy, group=group, dim=dim, ragged=True, paper=True),
        queries(2, group, dim),
        dim**-0.5,
    )
    now, data, mean = index.summaries, index.tables, policy == "mean_query"
    lengths, wanted = data["lengths"], data["wanted"]
    found = Ratios()
    index.select(query, K)
    keys = torch.randn(1, HEADS, 1000, dim, device="cuda", dtype=torch.bfloat16)
    trial = encoding.Summaries(*(x.clone() for x in (now.ids, now.codes, now.weights, now.sizes)))
    encoding.launch(keys, index.rotation, index.quantizer, trial, [1], [17])
    ids, codes, weights = encoding.definition(keys[0], index.rotation, index.quantizer)
    differ = {
        "ids": (trial.ids[1, :, :, 17:1017] != ids).float().mean(),
        "codes": (trial.codes[1, :, 17:1017] != codes).float().mean(),
        "weights": ((trial.weights[1, :, 17:1017].float() - weights.float()).abs() > 2**-7 * weights.float()).float().mean(),
    }
    for name, share in differ.items():
        demand(float(share) < 1e-3, f"encode: {float(share):.5f} of the {name} differ")
    for seq, n in enumerate(index.counts):
        flat = now.ids[seq, :, :, :n].long()
        counted = torch.zeros_like(now.sizes[seq]).scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.int32))
        demand(torch.equal(counted, now.sizes[seq]), "count: cluster sizes differ")
    totals = torch.full((2, HEADS, collision.BINS), 99, dtype=torch.int32, device="cuda")
    rotated, table = tiering.launch(query, index.rotation, now.sizes, data["limits"], totals, mean=mean, combine=index._combine)
    want = turning.rotate_queries(query, HEADS, index.rotation, mean=mean)
    demand(float((rotated.values - want).norm() / want.norm()) < 1e-5, "tiers: rotated queries differ")
    rounded = turning.in_bytes(rotated.values)
    demand(float((rotated.rounded() - rounded.rounded()).norm() / want.norm()) < 1e-3, "tiers: queries in bytes differ")
    votes = tiering.definition(tiering.similarities(rotated.values), now.sizes, data["limits"])
    demand(torch.equal(table, tiering.pack(votes, index._combine)), "tiers: votes differ")
    scores = collision.definition(table, now.ids, index._combine, index._shift)
    got = collision.launch(table, now.ids, lengths, totals.zero_(), index._combine, index._shift)
    for seq, n in enumerate(index.counts):
        demand(torch.equal(got.scores[seq, :, :n].int(), scores[seq, :, :n]), "collide: scores differ")
    demand(_counted(got, index.counts), "collide: counts differ")
    again, planes = rounding.launch(query, index.rotation, HEADS, totals.clone(), mean=mean, combine=index._combine)
    demand(float((again.rounded() - rounded.rounded()).norm() / want.norm()) < 1e-3, "planes: queries in bytes differ")
    subs = now.ids.shape[2]
    numbers = rounding.unpack(rounding.pack(rounding.coarse(rotated.values, index._combine)), subs)
    off = float((rounding.unpack(planes, subs) != numbers).float().mean())
    demand(off < 0.01, f"planes: {off:.4f} of the coordinates differ")  # just about half of a step
    by_signs = signing.launch(planes, now.ids, lengths, torch.zeros_like(totals))
    votes = signing.definition(planes, now.ids)
    for seq, n in enumerate(index.counts):
        demand(torch.equal(by_signs.scores[seq, :, :n].int(), votes[seq, :, :n]), "signs: scores differ")
    demand(_counted(by_signs, index.counts), "signs: counts differ")
    width = -(-found.most(now.capacity, K) // reranking.TILE) * reranking.TILE
    chosen = bucket.launch(got, lengths, wanted, width)
    candidates = bucket.definition(got.scores, lengths, wanted, width)
    known = torch.arange(width, device="cuda") < wanted[:, None, None]
    demand(torch.equal(chosen.masked_fill(~known, -1), candidates), "bucket_topk: candidates differ")
    estimate = reranking.definition(rotated, now.codes, now.weights, candidates, index.quantizer)
    run = choosing.run_length(width, K)
    assert run is not None
    made = reranking.launch(rotated, now, chosen, wanted, index.quantizer, scale, run)
    gap = (made.scores - estimate).masked_fill(~known[:, :, None], 0.0).norm() / estimate.masked_fill(
        ~known[:, :, None], 0.0
    ).norm()
    demand(float(gap) < 2**-12, f"rerank: estimates differ by {float(gap):.6f} of their norm")
    rows, counts = choosing.launch(made, chosen, wanted, K, SINK, scale, index._merge)
    merged = choosing.merge(made.scores.masked_fill(~known[:, :, None], -torch.inf), scale, index._merge)
    best, want_counts = choosing.definition(merged, candidates, K, SINK)
    missed = torch.stack([(~torch.isin(a, b)).sum() for a, b in zip(rows.flatten(0, 1), best.flatten(0, 1), strict=True)])
    demand(torch.equal(counts, want_counts) and int(missed.max()) <= 1, f"topk: {missed.tolist()} rows differ")
    whole = index.select(query, K)
    demand(torch.equal(whole.rows, rows), "select: rows differ from those of its steps")
    demand(torch.equal(index.select(query, K).rows, rows), "select: rows differ from run to run")
    return {name: float(share) for name, share in differ.items()} | {"estimates": float(gap), "rows": int(missed.sum())}


def _counted(found: collision.Scores, lengths: Sequence[int]) -> bool:
    """Whether each sequence's scores are counted as they are, in all and in each chunk."""
    assert found.counts is not None
    assert found.totals is not None
    for seq, n in enumerate(lengths):
        score, bins = found.scores[seq, :, :n].long(), collision.BINS
        score += torch.arange(n, device=score.device) // collision.CHUNK * bins
        chunks = -(-n // collision.CHUNK)
        each = torch.zeros((HEADS, chunks * bins), dtype=torch.int64, device=score.device)
        each.scatter_add_(1, score, torch.ones_like(score))
        at_least = each.unflatten(1, (chunks, bins)).flip(2).cumsum(dim=2).flip(2).int()
        if not torch.equal(found.counts[seq, :, :, :chunks].transpose(1, 2), at_least):
            return False
        if not torch.equal(found.totals[seq], at_least.sum(dim=1, dtype=torch.int32)):
            return False
    return True
