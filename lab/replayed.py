"""Keys, values and queries of real text, for a model of random weights that has none of its own.

The shipped model reads its book once. What its layers and heads had is dealt out to those of the benchmark's shape, and its queries
at the tokens behind the prompt are what the index is asked with, step after step: so units are as uneven, and rows come again as
often, as they do in text. The benchmark's own query still attends, at the same cost.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvthaw.cache.index_api import RECENT_QUERIES, IndexContext, Method, Selection
from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError
from kvthaw.index.around import AroundIndex
from lab.fill import Tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Record:
    """What the shipped model had of its book, for layers of a config's shape.

    length: tokens of the prompt, at most `most`; longer prompts repeat them. Behind them stand RECENT_QUERIES tokens whose queries
    are the steps', which then begin again. A smaller head_dim than the config's is padded with zeros, its queries scaled so that
    logits stay. Raises ConfigError for a config whose heads are smaller.
    """

    @torch.no_grad()
    def __init__(self, config: PretrainedConfig, length: int, device: torch.device) -> None:
        from kvthaw.engine.hf.model import load_shipped, positions
        from kvthaw.evaluate.files import read_asset

        config = config.get_text_config(decoder=True)
        self.heads, self.q_heads, self.dim = config.num_key_value_heads, config.num_attention_heads, config.head_dim
        model, tokenizer = load_shipped(device=str(device))
        self.most = cast(int, positions(model)) - RECENT_QUERIES
        self.length = min(length, self.most)
        book = torch.tensor(tokenizer(read_asset("book.txt"), add_special_tokens=False)["input_ids"], device=device)
        ids = book.repeat(-(-(self.length + RECENT_QUERIES) // len(book)))[: self.length + RECENT_QUERIES]
        cache = Cache(model, "full")
        model(ids[None], past_key_values=cache, logits_to_keep=1)
        layers = cache.kv.layers
        self.rows = [layer.read(0, 0, self.length) for layer in layers]  # [H, T, 2, D] each
        self.queries = [layer.recent_queries[0] for layer in layers]  # [Hq, RECENT_QUERIES, D] each
        theirs = self.rows[0].shape[-1]
        if theirs > self.dim:
            raise ConfigError(f"prompt is 'text', whose keys have {theirs} dimensions; the shape's head_dim is {self.dim}")
        self.stretch = math.sqrt(self.dim / theirs)

    def tokens(self, layer: int, length: int) -> Tokens:
        """A layer's prompt."""
        rows = self.rows[layer % len(self.rows)]
        mine = rows[torch.arange(self.heads, device=rows.device) % rows.shape[0]]
        made = torch.zeros((1, self.heads, length, 2, self.dim), dtype=rows.dtype, device=rows.device)
        for at in range(0, length, self.length):
            part = made[0, :, at : at + self.length, :, : rows.shape[-1]]
            part.copy_(mine[:, : part.shape[1]])
        return Tokens(layer, made, self.steps(layer).transpose(0, 1)[None], self.dim**-0.5)

    def steps(self, layer: int) -> Tensor:
        """What a layer's index is asked, [RECENT_QUERIES, Hq, D]."""
        theirs, rows = self.queries[layer % len(self.queries)], self.rows[0]
        head = torch.arange(self.q_heads, device=theirs.device)
        group, groups = self.q_heads // self.heads, theirs.shape[0] // rows.shape[0]
        mine = theirs[head // group % rows.shape[0] * groups + head % group % groups]
        padded = torch.nn.functional.pad(mine * self.stretch, (0, self.dim - rows.shape[-1]))
        return padded.transpose(0, 1).contiguous()

    def asked(self, method: Method) -> Method:
        """A method that is asked with these queries. One cache for each."""
        if method.index is None:
            return method
        return replace(method, index=cast(Any, partial(ReplayedIndex, self, _Place(), method.index)))


class _Place:
    """Which step the layers of a cache are at: [1] int64, which the first that asks advances."""

    def __init__(self) -> None:
        self.step = torch.empty(0)
        self.first: int | None = None


class ReplayedIndex(AroundIndex):
    """An index that is asked with the queries of a record; a sequence's are some steps ahead of those of the sequence before."""

    def __init__(self, record: Record, place: _Place, make: Any, shape: IndexContext) -> None:
        super().__init__(shape, make(shape))
        self.record, self.place = record, place
        self.queries = torch.empty(0)

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        if self.queries.device != query.device or not len(self.queries):
            self.queries = self.record.steps(self.context.layer).to(query.device, query.dtype)
            if self.place.first is None:
                self.place.step, self.place.first = torch.zeros(1, dtype=torch.int64, device=query.device), self.context.layer
        if self.place.first == self.context.layer:
            self.place.step.add_(1)
        seqs = torch.arange(query.shape[0], device=query.device)
        at = (self.place.step.to(query.device) + 17 * seqs) % RECENT_QUERIES
        return self.inner.select(self.queries.index_select(0, at), budget)
