"""Caches that begin at a length without the prefill: keys and values are drawn, everything else is done as after a prefill.

The layers take the tokens over as a fork does: they are offloaded and indexed, sink and ring are filled. One row of a batch is
filled, the others are its copies and share its rows on the host. That decoding goes on as after a prefill of the same keys is
checked by `lab.filled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import PrefillKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.tensor_parallel import ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Tokens(DenseLayer):
    """A layer's tokens that another layer can take over. rows [1, H, T, 2, D]; queries [1, Hq, W, D]: the last tokens'."""

    def __init__(self, number: int, rows: Tensor, queries: Tensor, scale: float) -> None:
        sequences = Sequences()
        sequences.adopt([rows.shape[2]])
        super().__init__(number, sequences, DeviceMemory(), RECENT_QUERIES)
        self.recent_queries[0], self.scale = queries[0], scale
        self._data = rows

    @property
    def rows(self) -> Tensor:
        """[1, H, T, 2, D]."""
        return self._data


def drawn(model: PreTrainedModel, layer: int, length: int, seed: int) -> Tokens:
    """Keys, values and queries of independent standard normal numbers; of this process's heads of a split model."""
    config, device, own = model.config.get_text_config(decoder=True), model.device, ranks(model)
    generator = torch.Generator(device=device).manual_seed(seed * 1009 + layer + 7919 * own.rank)
    parts, dim = own.size if own.splits_heads else 1, config.head_dim
    heads, asking = config.num_key_value_heads // parts, config.num_attention_heads // parts
    rows = torch.empty((1, heads, length, 2, dim), dtype=model.dtype, device=device)
    for part in rows.split(1 << 16, dim=2):
        part.normal_(generator=generator)
    queries = torch.empty((1, asking, RECENT_QUERIES, dim), dtype=model.dtype, device=device)
    return Tokens(layer, rows, queries.normal_(generator=generator), dim**-0.5)


def fill(
    cache: DynamicCache, tokens: Callable[[int], Tokens], *, batch: int = 1, shared: bool = False, coming: int = 0
) -> None:
    """Put tokens into an empty cache, of kvthaw or of transformers, and make `batch` rows of them.

    tokens: of a layer, by number. shared: layers hold the host rows of the first that is frozen, so tokens must give all of
    them the same. coming: tokens for which host memory is taken now: page-locking it takes milliseconds a block, which a process
    that ran before has behind it. Returns when all is offloaded and indexed."""
    if isinstance(cache, Cache):
        _fill(cache.kv, (tokens(layer.number) for layer in cache.kv.layers), batch, shared, coming)
    else:
        for number, layer in enumerate(cache.layers):
            of = tokens(number)
            layer.update(of.rows[:, :, :, 0].repeat(batch, 1, 1, 1), of.rows[:, :, :, 1].repeat(batch, 1, 1, 1))
            if getattr(cache, "offloading", False):
                layer.offload()
    if isinstance(cache, Cache) and cache.settings.method.prefetches:
        _introduce(cache)
    if getattr(cache, "offloading", False):
        cache.layers[0].prefetch()  # as the last layer of a forward does


@contextmanager
def prompts_drawn(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model gives the cache of a running batch drawn keys and values for a prompt, each layer and sequence its own,
    instead of computing them, and zeros for logits."""

    def forward(input_ids: Tensor, past_key_values: Cache, **_: object) -> SimpleNamespace:
        tokens, kv = input_ids.shape[1], past_key_values.kv

        def take(layer: OffloadedLayer | DenseLayer, step: Step) -> PrefillKV | None:
            of = drawn(model, layer.number, tokens, step.start + next((seq for seq, _ in step.parts), 0))
            (query,), (key, value) = of.recent_queries.values(), of.rows.unbind(3)
            if isinstance(layer, DenseLayer):
                layer.scale = of.scale
            elif layer.plan is None:
                layer.allocate(step, query[None], key, of.scale)
            return layer.append(step, query[None], key, value)

        kv.append_stored_prompt(tokens, None, take)
        return SimpleNamespace(logits=torch.zeros((1, 1, model.config.vocab_size), device=input_ids.device))

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def _introduce(cache: Cache) -> None:
    """Tell the layers whose attention they are, as a prompt does, by a token that another cache takes."""
    model = cache.layers[0].shared.model()
    other = Cache(model, "full")
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), past_key_values=other)
    for layer, known in zip(cache.layers, other.layers, strict=True):
        layer.remember_module(known.module())


def _fill(cache: KVCache, tokens: Iterator[Tokens], batch: int, shared: bool, coming: int) -> None:
    first = next(tokens)
    cache.clone(first.sequences, _offloaded(cache, chain([first], tokens), shared))
    cache.wait()
    if batch > 1:
        cache.reorder([0] * batch)
    for layer in cache.offloaded if coming else ():
        for seq in range(batch):  # after all have shared: what is taken is each one's own
            layer.store.claim([(seq, layer.store.length(seq) + coming)])


def _offloaded(cache: KVCache, tokens: Iterator[Tokens], shared: bool) -> Iterator[Tokens]:
    """The tokens of each layer, once the layer before has offloaded its own. shared: and holds the host rows of the first."""
    first = next(iter(cache.offloaded), None)
    for layer, of in zip(cache.layers, tokens, strict=True):
        yield of
        if isinstance(layer, OffloadedLayer):
            layer.wait()
            if shared and first is not None and layer is not first and layer.store.length(0):
                layer.store.adopt(0, first.store.blocks(0), first.store.length(0))
