"""Plain loops over a model's forward: chunked prefill with a report of how far it is, and decoding token by token."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.engine.prefill import CHUNK as STREAMED
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.model import positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvthaw.engine.hf import Cache

CHUNK = 2048
"""Tokens of a prompt that go through the model at once where all KV stays on the device."""

Pick = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """The likeliest token of logits [V]."""
    return int(logits.argmax())


def sampler(temperature: float, seed: int) -> Pick:
    """Draws from softmax(logits / temperature), the same tokens for the same seed; temperature 0 is greedy.

    Raises ConfigError for a negative temperature.
    """
    at_least(0, temperature=temperature)
    if temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        weights = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=generator))

    return draw


def check_prompt(model: PreTrainedModel, tokens: int) -> None:
    """Raise ConfigError, before any work is done, for a prompt that is empty or longer than the model's positions."""
    if tokens == 0:
        raise ConfigError("the prompt is empty")
    limit = positions(model)
    if limit is not None and tokens > limit:
        raise ConfigError(f"the prompt has {tokens:,} tokens; the model's positions end at {limit:,}")


def chunks(tokens: int, size: int = CHUNK) -> list[tuple[int, int]]:
    """Equal spans that cover a prompt."""
    count = max(1, -(-tokens // size))
    edges = [tokens * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: Cache,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Bring a prompt into the cache, chunk by chunk. Returns the logits [V] after its last token, which no chunk size changes.

    chunk: tokens at once; None is CHUNK, STREAMED where KV is streamed back from the host, or the whole prompt where later chunks
    would not find what they need (see `kvthaw.engine.prefill`). progress(done, total), in tokens, is called at the start and
    after every layer of every chunk. Does not wait for offloading and indexing. Raises ConfigError as `check_prompt`, before
    anything has changed.
    """
    check_prompt(model, cache.get_seq_length() + len(ids) if ids else 0)
    tell = progress or (lambda done, total: None)
    tell(0, len(ids))
    logits: Tensor | None = None
    size = CHUNK if cache.settings.method.dense else STREAMED
    if cache.foreign or cache.settings.method.evicts:
        size = len(ids)
    with cache.prompt(len(ids)):
        for start, stop in chunks(len(ids), chunk or size):
            shares = partial(_between, tell, start, stop, len(ids))
            with _by_layer(model, shares):
                logits = forward(model, cache, ids[start:stop])
            shares(1.0)
    assert logits is not None
    return logits


def _between(tell: Callable[[int, int], None], start: int, stop: int, total: int, share: float) -> None:
    tell(start + int((stop - start) * share), total)


@contextmanager
def _by_layer(model: PreTrainedModel, tell: Callable[[float], None]) -> Iterator[None]:
    """Call tell(share) after every decoder layer but the last, where the model has its layers in the usual place."""
    layers = list(getattr(model.get_decoder(), "layers", []))[:-1]
    hooks = []
    for number, layer in enumerate(layers, 1):
        share = number / (len(layers) + 1)
        hooks.append(layer.register_forward_hook(lambda *_, share=share: tell(share)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forward(model: PreTrainedModel, cache: Cache, ids: Sequence[int]) -> Tensor:
    """One forward over a few tokens of one row; the logits [V] after the last."""
    return forward_rows(model, cache, [ids])[0]


@torch.no_grad()
def forward_rows(model: PreTrainedModel, cache: Cache, ids: Sequence[Sequence[int]]) -> Tensor:
    """One forward over as many tokens of each row; the logits [B, V] after the last. Rows stand where their own tokens end."""
    tokens = torch.tensor([list(row) for row in ids], device=model.device)
    layer = cache.kv_layers[0]
    where: dict[str, Tensor] = {}
    if any(layer.left_pad):
        lengths = torch.tensor([layer.length(lane) for lane in range(layer.lanes)], device=model.device)
        where["position_ids"] = lengths[:, None] + torch.arange(tokens.shape[1], device=model.device)
    out = model(input_ids=tokens, past_key_values=cache, use_cache=True, **where, **_last_only(model))
    last: Tensor = out.logits[:, -1]
    return last


def decode(
    model: PreTrainedModel, cache: Cache, logits: Tensor, *, limit: int, stops: frozenset[int], pick: Pick = greedy
) -> Iterator[int]:
    """Tokens one by one, from the logits [V] before the first, until `limit`, a stop token (kept back) or the last position.

    A token enters the cache when the next one is asked for.
    """
    most = positions(model)
    for left in range(limit, 0, -1):
        token = pick(logits)
        if token in stops:
            return
        yield token
        if left == 1 or (most is not None and cache.get_seq_length() >= most):
            return
        logits = forward(model, cache, [token])


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a generation, from the generation config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


class TextStream:
    """Turns tokens into text as they come; holds back bytes that are not a whole character yet."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    @property
    def text(self) -> str:
        """All the text so far."""
        text: str = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text

    def push(self, token: int) -> str:
        """The text that a token adds."""
        self.tokens.append(token)
        text = self.text
        return "" if text.endswith("�") else self._advance(text)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(self.text)

    def _advance(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new


def _last_only(model: PreTrainedModel) -> dict[str, int]:
    """Ask for the last token's logits alone, where the model can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
