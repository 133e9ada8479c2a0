"""Sequences of random keys, and indexes over them with the store filled as a layer would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.cache.streams import AuxStream, DeferredBatch
from kvthaw.index.draws import drawn, stream
from kvthaw.regions import Regions

FIRST = 4


def sample_positions(positions: Tensor, count: int, *, seed: int, layer: int, heads: int) -> Tensor:
    """The positions that each head of a layer draws, as indices into positions [n], [H, count] int64."""
    context: Any = SimpleNamespace(seed=seed, layer=layer, heads=range(heads))
    return drawn(positions, count, stream(context) + torch.arange(heads)[:, None])


class Seqs:
    """Sequences of one index, fed in step: keys[sequence] [H, T, D], of which tokens FIRST .. length[sequence] have been given."""

    def __init__(
        self,
        make: Callable[[IndexContext], Index],
        prompts: Sequence[int],
        *,
        heads: int = 2,
        group: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        more: int = 900,
        seeds: Sequence[int] | None = None,
        build: bool = True,
    ) -> None:
        self.device = device or torch.device("cpu")
        seeds = range(len(prompts)) if seeds is None else seeds
        self.keys, self.queries = [], []
        for prompt, seed in zip(prompts, seeds, strict=True):
            g = torch.Generator().manual_seed(seed)
            self.keys.append(torch.randn(heads, FIRST + prompt + more, dim, generator=g).to(dtype).to(self.device))
            self.queries.append(torch.randn(heads * group, 200, dim, generator=g).to(dtype).to(self.device))
        pinned = self.device.type == "cuda"
        self.store = HostStore(len(prompts), heads, dim, dtype, block_size=32, pinned=pinned)
        regions = Regions(FIRST, 64, 16)
        self.deferred = DeferredBatch()
        self.context = IndexContext(
            3,
            heads * group,
            heads,
            dim,
            dtype,
            self.device,
            self.store,
            regions,
            scale=dim**-0.5,
            seed=7,
            aux=AuxStream(),
            deferred=self.deferred,
        )
        self.index = make(self.context)
        self.length = [FIRST] * len(prompts)
        for seq, prompt in enumerate(prompts):
            self.put(seq, FIRST + prompt)
            if prompt and build:
                keys = self.keys[seq][:, FIRST : FIRST + prompt]
                self.index.build(seq, FIRST, keys, keys, self.queries[seq][:, :64])
            self.length[seq] = FIRST + prompt

    def put(self, seq: int, length: int) -> None:
        have = self.store.length(seq)
        if have < length:
            keys = self.keys[seq][:, have:length].cpu()
            self.store.append(seq, torch.stack((keys, keys), dim=2))

    def append(self, n: int, seqs: Sequence[int] | None = None) -> None:
        """The next n tokens of some sequences."""
        seqs = range(len(self.length)) if seqs is None else seqs
        keys = torch.stack([self.keys[seq][:, self.length[seq] : self.length[seq] + n] for seq in seqs])
        for seq in seqs:
            self.put(seq, self.length[seq] + n)
            self.length[seq] += n
        self.index.append(list(seqs), keys, keys, None)

    def truncate(self, seq: int, length: int) -> None:
        self.index.truncate(seq, length)
        self.store.truncate(seq, length)
        self.length[seq] = length

    def query(self, step: int = 100) -> Tensor:
        return torch.stack([queries[:, step] for queries in self.queries])

    def select(self, budget: int, step: int = 100) -> Selection:
        """One step, with the rows checked: none twice, none outside, -1 behind, as many as counts say, all where all fit."""
        selection = self.index.select(self.query(step), budget)
        rows, counts = selection.rows.cpu(), selection.counts.cpu()
        assert rows.dtype == counts.dtype == torch.int32
        assert rows.shape[2] == budget
        for seq, length in enumerate(self.length):
            for head in range(rows.shape[1]):
                n, own = int(counts[seq, head]), rows[seq, head].tolist()
                assert own[n:] == [-1] * (budget - n)
                assert len(set(own[:n])) == n == min(budget, length - FIRST)
                assert all(FIRST <= row < length for row in own[:n])
        return selection

    def sets(self, budget: int, step: int = 100) -> list[list[set[int]]]:
        """The rows of every sequence and head, as sets without the padding."""
        rows = self.select(budget, step).rows
        return [[set(head.tolist()) - {-1} for head in seq] for seq in rows]
