"""The loop of one-token steps that every command shares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvthaw.engine.graph_runner import ElasticGraph, capturable
from kvthaw.engine.hf import Cache, DynamicCache, PreTrainedModel
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.fused import fused, fusing
from kvthaw.engine.hf.handle import is_attached
from kvthaw.engine.hf.model import positions
from kvthaw.engine.sampling import GREEDY, Sampler, Sampling

Tokens = Sequence[int] | Tensor
"""The next token of each row."""


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    cache: Cache | DynamicCache,
    logits: Tensor,
    choose: Callable[[Tensor], Tokens | None],
    *,
    capture: bool = True,
) -> Iterator[Tokens]:
    """Sample tokens with `choose` from the logits [B, V], yield them, run the model on them, and repeat.

    Ends when `choose` returns None. A token enters the cache only when the next one is requested, so a caller that stops
    iterating wastes no step. The logits given to `choose` are valid until the next step.

    On a GPU steps are replayed from CUDA graphs, if the method allows it and all observers are graph_safe. Elsewhere they
    run eagerly.

    capture: False: take every step eagerly.
    """
    while (tokens := choose(logits)) is not None:
        yield tokens
        logits = _step(model, cache, torch.as_tensor(tokens, device=model.device).reshape(-1, 1), capture)


@torch.no_grad()
def feed(model: PreTrainedModel, cache: Cache | DynamicCache, tokens: Sequence[int] | Tensor) -> Iterator[Tensor]:
    """Feed given tokens to a cache one by one. Yields the logits [B, V] after each, valid until the next.

    tokens: [B, n], or [n] for one row.
    """
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=model.device)
    for column in torch.atleast_2d(ids).unbind(1):
        yield _step(model, cache, column[:, None], True)


def generate(
    model: PreTrainedModel,
    cache: Cache,
    logits: Tensor,
    *,
    limit: int,
    stops: frozenset[int] = frozenset(),
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = (),
    capture: bool = True,
) -> Generator[int, None, Literal["stop", "length"]]:
    """Yield the tokens of a cache of one row until `limit` tokens, a stop token (not yielded) or the model's last position.

    Returns "stop" after a stop token, else "length".

    logits: [V], before the first token.
    prompt: the tokens before, for penalties.
    """
    most, sampler = positions(model), Sampler(1, logits.shape[-1], logits.device)
    sampler.join(0, sampling, prompt, stops)

    def choose(after: Tensor) -> Tokens | None:
        token = int(sampler(after, torch.tensor([cache.get_seq_length()], device=after.device)).tokens)
        return None if token in stops else [token]

    for given, (token,) in enumerate(decode(model, cache, logits[None], choose, capture=capture) if limit > 0 else (), 1):
        yield int(token)
        if given == limit or (most is not None and cache.get_seq_length() >= most):
            return "length"
    return "stop" if limit > 0 else "length"


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache | DynamicCache, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Run the model eagerly on ids [B, T], equally many tokens per row. Returns the logits [B, V] after the last."""
    tokens = torch.as_tensor(ids, device=model.device)
    where: dict[str, Any] = {}
    if isinstance(cache, Cache) and any(cache.kv.sequences.left_pad):
        where["position_ids"] = _lengths(cache, model.device) + torch.arange(tokens.shape[1], device=model.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        where["logits_to_keep"] = 1
    with fused(model):
        last: Tensor = model(input_ids=tokens, **{CACHE: cache}, use_cache=True, **where).logits[:, -1]
    return last


def _step(model: PreTrainedModel, cache: Cache | DynamicCache, ids: Tensor, capture: bool) -> Tensor:
    if not capture or not ids.is_cuda or not isinstance(cache, Cache) or is_attached(model):  # such a model replays by itself
        return forward(model, cache, ids)
    if cache.replay is None and not cache.reordered and capturable(cache) is None:
        cache.replay = ElasticGraph(fusing(model, model.forward), cache)
    if cache.replay is None or cache.reordered:
        return forward(model, cache, ids)
    return cache.replay(ids, _lengths(cache, ids.device))[:, -1]


def _lengths(cache: Cache, device: torch.device) -> Tensor:
    """Return the length of each row, [B, 1]."""
    sequences = cache.kv.sequences
    lengths = [sequences.length(seq) for seq in range(sequences.count)]
    if len(set(lengths)) == 1:  # made on the device
        return torch.full((len(lengths), 1), lengths[0], device=device)
    return torch.tensor(lengths, device=device)[:, None]
