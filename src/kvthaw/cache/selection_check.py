"""Check an index's selection before any kernel reads memory at its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import CacheError


def check_selection(
    found: object, who: str, context: IndexContext, seqs: int, budget: int, head_limit: int, ends: Tensor
) -> None:
    """Raise CacheError if an index violated its contract. Copies to the host, and waits for that.

    found: the result of select() for `seqs` sequences and `budget` rows per KV head.
    who: the index's name.
    head_limit: see Method.
    ends: [B] int32, the end of the positions that the index holds; they begin after the sink.
    """

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise CacheError(f"{who}, layer {context.layer}: {what}")

    need(isinstance(found, Selection), f"select() returned {type(found).__name__}; it must return a Selection")
    assert isinstance(found, Selection)
    rows, heads = found.rows, (seqs, context.kv_heads)
    width = rows.shape[2] if rows.dim() == 3 else budget
    wanted = {"rows": (rows, (*heads, width), torch.int32), "counts": (found.counts, heads, torch.int32)}
    if found.log_weight is not None:
        wanted["log_weight"] = (found.log_weight, (seqs, context.q_heads, width), torch.float32)
    if found.partial is not None:
        wanted["partial.out"] = (found.partial.out, (seqs, context.q_heads, context.head_dim), torch.float32)
        wanted["partial.lse"] = (found.partial.lse, (seqs, context.q_heads), torch.float32)
    for name, (tensor, size, dtype) in wanted.items():
        is_, must = f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {list(size)}"
        need(tensor.dtype == dtype and tuple(tensor.shape) == size, f"{name} is {is_}; it must be {must}")
    need(width <= head_limit * budget, f"rows has {width} places a KV head; at most {head_limit * budget} may be selected")
    most = int(found.counts.sum(dim=1).max()) if found.counts.numel() else 0
    need(
        most <= budget * context.kv_heads,
        f"the KV heads select {most} rows together; at most {budget} x {context.kv_heads} heads may be selected",
    )
    rows, counts, ends = rows.cpu(), found.counts.cpu(), ends.cpu()
    sink = context.regions.sink
    held = rows >= 0
    for bad, what in (
        ((rows < -1) | (held & ((rows < sink) | (rows >= ends[:, None, None]))), "is outside of"),
        (_again(rows), "is there twice; of"),
    ):
        if bad.any():
            seq, head, place = bad.nonzero()[0].tolist()
            where = f"sequence {seq}, KV head {head}"
            need(False, f"{where}: row {int(rows[seq, head, place])} {what} its positions [{sink}, {int(ends[seq])})")
    wrong = held.sum(dim=2) != counts
    if wrong.any():
        seq, head = wrong.nonzero()[0].tolist()
        have = int(held[seq, head].sum())
        need(False, f"sequence {seq}, KV head {head}: counts is {int(counts[seq, head])}, but {have} rows are not -1")


def _again(rows: Tensor) -> Tensor:
    """Mark the repeated rows among rows [B, H, M] of a KV head, [B, H, M] bool."""
    ordered, order = torch.sort(rows, dim=2, stable=True)
    same = torch.zeros_like(rows, dtype=torch.bool)
    same[:, :, 1:] = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    return torch.zeros_like(same).scatter_(2, order, same)
