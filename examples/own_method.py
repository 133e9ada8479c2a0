"""A method of your own: an index, and the fields of a Method around it. This one keeps the keys of the largest norm."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

import kvthaw
from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.engine.hf.model import load_shipped
from kvthaw.regions import Regions


class LargestKeys:
    """Selects the same rows whatever the query: those whose keys have the largest norm."""

    graph_safe, grows, on_host = False, True, False

    def __init__(self, context: IndexContext) -> None:
        self.heads = context.kv_heads
        self.norms: dict[int, Tensor] = {}  # sequence -> [H, T], from position `first` on
        self.first = context.regions.sink

    def make_room(self, seqs: int, tokens: int) -> None:
        """Nothing to allocate ahead: this index is not graph-safe."""

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.first, self.norms[seq] = first, keys.float().norm(dim=-1)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        for seq, k in zip(seqs, keys, strict=True):
            self.norms[seq] = torch.cat((self.norms[seq], k.float().norm(dim=-1)), dim=1)

    def select(self, query: Tensor, budget: int) -> Selection:
        rows = torch.full((query.shape[0], self.heads, budget), -1, dtype=torch.int32, device=query.device)
        counts = torch.zeros(rows.shape[:2], dtype=torch.int32, device=query.device)
        for seq, norms in self.norms.items():
            best = torch.topk(norms, min(budget, norms.shape[1]), dim=1).indices + self.first
            rows[seq, :, : best.shape[1]] = best.int()
            counts[seq] = best.shape[1]
        return Selection(rows, counts)

    def truncate(self, seq: int, length: int) -> None:
        if seq in self.norms:
            self.norms[seq] = self.norms[seq][:, : max(0, length - self.first)]

    def reorder(self, seqs: Sequence[int]) -> None:
        self.norms = {new: self.norms[old] for new, old in enumerate(seqs) if old in self.norms}

    def tensors(self) -> list[Tensor]:
        return list(self.norms.values())

    def clone_from(self, other: Self) -> None:
        self.norms, self.first = dict(other.norms), other.first


def largest_keys(*, sink: int = 4) -> kvthaw.Method:
    """Keys of the largest norm, on the device; every head of a group reads its KV head's."""
    return kvthaw.Method("largest-keys", paper="-", unit="token", index=LargestKeys, regions=Regions(sink, 32, 16))


METHODS = {"largest-keys": largest_keys}  # what `--plugin examples/own_method.py` adds to a command

if __name__ == "__main__":
    model, tokenizer = load_shipped()
    inputs = tokenizer("The sky is blue. The sun is yellow. Here we go. " * 40, return_tensors="pt").to(model.device)
    with kvthaw.attach(model, largest_keys(), budget=64) as handle:
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(handle.stats())
