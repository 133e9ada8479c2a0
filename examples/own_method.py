"""A method of your own in one file, which docs/own-method.md explains: the tokens whose keys' signs agree best with the query."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

import kvthaw
from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.regions import Regions


class SignIndex(Index):
    """Keeps the sign of every channel of every key, and ranks tokens by the query's product with them."""

    def __init__(self, context: IndexContext) -> None:
        self.context = context
        self.signs: dict[int, Tensor] = {}  # sequence -> [H, T, D] int8; column 0 is the first token after the sink

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.signs[seq] = keys.sign().to(torch.int8)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        for seq, new in zip(seqs, keys.sign().to(torch.int8), strict=True):
            self.signs[seq] = torch.cat((self.signs[seq], new), dim=1) if seq in self.signs else new

    def select(self, query: Tensor, budget: int) -> Selection:
        heads, sink = self.context.kv_heads, self.context.regions.sink
        rows = torch.full((len(query), heads, budget), -1, dtype=torch.int32, device=query.device)
        for seq, signs in self.signs.items():
            grouped = query[seq].float().view(heads, self.context.group, -1)  # [H, G, D]
            scores = (grouped @ signs.float().transpose(1, 2)).amax(dim=1)  # [H, T], the best of the group's query heads
            best = scores.topk(min(budget, scores.shape[1]), dim=1).indices
            rows[seq, :, : best.shape[1]] = best.int() + sink
        return Selection(rows, counts=(rows >= 0).sum(dim=2, dtype=torch.int32))

    def truncate(self, seq: int, length: int) -> None:
        if seq in self.signs:
            self.signs[seq] = self.signs[seq][:, : max(0, length - self.context.regions.sink)]

    def reorder(self, seqs: Sequence[int]) -> None:
        self.signs = {new: self.signs[old] for new, old in enumerate(seqs) if old in self.signs}

    def clone_from(self, other: Self) -> None:
        self.signs = {seq: signs.clone() for seq, signs in other.signs.items()}

    def tensors(self) -> list[Tensor]:
        return list(self.signs.values())


def sign_keys(*, sink: int = 4, window: int = 32) -> kvthaw.Method:
    """Tokens by the signs of their keys. Host: the rows. Device: a byte a channel. A group of heads takes its best score."""
    return kvthaw.Method("sign-keys", paper="-", unit="token", index=SignIndex, regions=Regions(sink, window, buffer=16))


METHODS = {"sign-keys": sign_keys}

if __name__ == "__main__":
    from kvthaw.engine.hf.model import load_shipped

    model, tokenizer = load_shipped()
    inputs = tokenizer("The sky is blue. The sun is yellow. Here we go. " * 40, return_tensors="pt").to(model.device)
    with kvthaw.attach(model, sign_keys(), budget=64) as handle:
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(handle.stats())
