"""Captured prefills: the forward of a whole short prompt, captured in a CUDA graph for each of a few lengths and replayed.

Layer by layer, the host launches the forward of an 8B model in about 50 ms. An H100 computes 2,000 tokens in that time. A
replay takes the host 1 ms. The prompt is padded at its end, where causal attention hides the padding from its tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.device_memory import uncollected
from kvthaw.cache.layer_base import AttentionParams, LayerShape, PrefillKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step
from kvthaw.cache.streams import SegmentedGraph
from kvthaw.engine.graph_runner import forward_needs_host
from kvthaw.engine.hf.batch_cache import BatchCache, packs
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.fused import fused
from kvthaw.engine.hf.layer import CacheLayer, TaggingLayer, uses_flash_attention_4
from kvthaw.errors import first_line
from kvthaw.kernels.row_format import row_format

_log = logging.getLogger(__name__)
LENGTHS = (*range(128, 1024, 128), *range(1024, 2048, 256), 2048)
"""Lengths that prompts are padded to, up to the batch's capacity. Each has a graph of its own."""
LONGEST = LENGTHS[-1]


class PromptGraphs:
    """Prefill whole prompts of at most LONGEST tokens by replaying a captured forward, one graph for each length.

    The first prompt of each length runs eagerly, which compiles kernels; the second is captured. Keys, values and the last
    queries of each layer land in fixed buffers. The cache stores them after the forward.

    queries: how many of a prompt's last queries the cache keeps.
    capture: False: run every prompt eagerly.
    lengths: see LENGTHS.
    captures: number of captures.
    """

    def __init__(self, model: PreTrainedModel, cache: BatchCache, queries: int, *, capture: bool = True) -> None:
        self._model, self._cache, self._queries, self._capture, self.captures = model, cache, queries, capture, 0
        most: int = min(LONGEST, cache.kv.sequences.room)
        self.lengths: list[int] = [*(length for length in LENGTHS if length < most), most]
        self._failed = False  # a capture did, so prompts are better prefilled with the cache
        self._layers: list[_Recorder] = []
        self._graphs: dict[int, SegmentedGraph | None] = {}  # None: ran eagerly so far
        self._adapters: object = None  # of the graphs
        self._logits = torch.empty(0)

    def serves(self, tokens: int) -> bool:
        """Return whether a prompt of this many tokens can be prefilled here, with the layers that are in force."""
        on_host = any(layer.on_host for layer in self._cache.kv.offloaded[:1])
        return 1 < tokens <= self.lengths[-1] and not (on_host or self._failed)

    def padded(self, tokens: int) -> int:
        """Return the length that a prompt is padded to."""
        return self.lengths[bisect_left(self.lengths, tokens)]

    @torch.inference_mode(False)  # buffers outlive the caller's mode
    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Prefill the prompt of the sequence that `Sequences.prompts` announced. Returns its last logits [1, V].

        ids: [1, T], the whole prompt.
        """
        tokens, first = ids.shape[1], next(layer for layer in self._cache.layers if isinstance(layer, CacheLayer))
        first.shared.check_attached()
        length, adapters = self.padded(tokens), self._cache.adapters()
        if adapters != self._adapters:
            self._graphs, self._adapters = {}, adapters
        if not self._layers:
            self._allocate(ids.device)
        self._ids[:, :tokens].copy_(ids)
        self._last.fill_(tokens - 1)
        torch.add(self._before, tokens, out=self._places).clamp_(min=0)
        if (graph := self._graphs.get(length)) is not None:
            graph.replay()
        elif self._capture and length in self._graphs:
            self._capture_and_run(length)
        else:
            self._run(length)
            self._graphs[length] = None
        first.check(self._layers[0].kv[:, :, :tokens, 0], [0], before=0)
        kv, coming = self._cache.kv, iter(self._layers)

        def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> PrefillKV | None:
            """Copy the tokens from the buffers, which the next forward overwrites. A layer copies queries itself."""
            new = next(coming)
            (keys, values), queries = new.kv[:, :, :tokens].clone().unbind(3), new.queries[:, :, -tokens:]
            kv_format = row_format(kv.settings.kv_dtype, keys.shape[3], keys.dtype)
            layer.prepare(step, LayerShape(queries[:, :, :0], keys[:, :, :0], new.scale, kv_format))
            return layer.append(step, queries, keys, values)

        kv.streams.follow(ids.device)
        kv.append_stored_prompt(tokens, None if kv.sequences.count > 1 else [0], fill)
        return self._logits.clone()

    @torch.inference_mode(False)
    @torch.no_grad()
    def warm(self) -> None:
        """Capture the graphs of all lengths, the longest first: the others use its memory."""
        self._adapters = self._cache.adapters()
        if not self._layers:
            self._allocate(self._model.device)
        self._last.zero_()
        self._places.zero_()  # a longer prompt had others
        for length in reversed(self.lengths):
            if self._capture:
                self._run(length)
                self._capture_and_run(length)

    def _allocate(self, device: torch.device) -> None:
        most = self.lengths[-1]
        self._ids = torch.zeros(1, most, dtype=torch.int64, device=device)
        self._positions = torch.arange(most, device=device)[None]
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._before = torch.arange(-self._queries, 0, device=device)
        self._places = torch.zeros_like(self._before)
        self._layers = [_Recorder(most, self._places, uses_flash_attention_4(self._model)) for _ in self._cache.layers]
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None

    def _run(self, length: int) -> None:
        """Compute the model's forward of the first `length` ids into the buffers."""
        tape: Any = TransformersCache(layers=list(self._layers))
        with fused(self._model):
            how = {"position_ids": self._positions[:, :length], "logits_to_keep": self._last}
            logits = self._model(input_ids=self._ids[:, :length], **{CACHE: tape}, use_cache=True, **how).logits[:, 0]
            if not self._logits.numel():
                self._logits = torch.empty_like(logits)
            self._logits.copy_(logits)

    def _capture_and_run(self, length: int) -> None:
        """Capture the forward of `length` tokens and replay it. If the capture fails, run eagerly, and capture no more."""
        try:
            with uncollected(), SegmentedGraph(self._pool) as graph:
                self._run(length)
        except RuntimeError as error:  # the model needs the host, or memory is short
            self._run(length)  # raises if the capture was not the cause
            _log.info("prompts are prefilled without captures: %s", first_line(error))
            self._capture, self._failed = False, True
            return
        self._graphs[length] = graph
        self.captures += 1
        graph.replay()


class _Recorder(TaggingLayer):
    """A layer of an empty cache that attends to the tokens of one forward and copies them to buffers.

    most: tokens that the buffers have room for.
    flash4: see TaggingLayer.
    places: the tokens whose queries are kept, on the device.
    kv: their keys and values, [1, H, most, 2, D].
    queries: the last ones, [1, Hq, W, D].
    """

    def __init__(self, most: int, places: Tensor, flash4: bool) -> None:
        super().__init__()
        self.flash4 = flash4
        self._most, self._places, self.scale = most, places, 0.0
        self.kv = self.queries = torch.empty(0)
        self.is_initialized = True  # nothing to initialise early

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attention: AttentionParams,
    ) -> Tensor:
        """Attend causally: query [1, Hq, T, D], key and value [1, H, T, D]. Returns [1, Hq, T, D]."""
        heads, dim = key.shape[1], key.shape[3]
        if not self.kv.numel():
            self.kv = key.new_empty((1, heads, self._most, 2, dim))
            self.queries = query.new_empty((1, query.shape[1], len(self._places), dim))
        self.scale, new = attention.scale, self.kv[:, :, : key.shape[2]]
        new[:, :, :, 0], new[:, :, :, 1] = key, value
        self.queries.copy_(query.index_select(2, self._places))
        return attention.causal(query, key, value)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tag new keys and values [1, H, T, D]."""
        return self.tagged(key_states, value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def prompt_graphs(model: PreTrainedModel, cache: BatchCache, *, capture: bool = True) -> PromptGraphs | None:
    """Return the captured prefills of a batch; None if the model or the method cannot have them."""
    queries, windows = cache.settings.method.prompt_queries, not all(layer.keeps_all for layer in cache.kv.layers)
    if queries is None or windows or cache.shares_kv or not packs(cache) or forward_needs_host(cache) is not None:
        return None
    if cache.searches_on_host and cache.settings.full_below is None:
        return None
    return PromptGraphs(model, cache, queries, capture=capture)
