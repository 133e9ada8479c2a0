"""Answers from a cache that holds contexts: many rows at once, each ending by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvthaw.evaluate.decode import TextStream, forward_rows
from kvthaw.evaluate.model import positions

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvthaw.engine.hf import Cache

Picks = Callable[["Tensor"], list[int]]
LINE = ("\n",)


def greedy_rows(logits: Tensor) -> list[int]:
    """The likeliest token of each row of logits [B, V]."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


class Answers:
    """The answers of a cache's rows: the rest of the prompt, then decoding to a stop token, one of `until`, or the limit.

    A row's tokens depend on no other row; one that has ended waits for the rest. pick: the token of each row of logits [B, V].
    until: texts that end an answer once it has begun; those before its first word do not count. steps: how many tokens each row
    has sent through the model; over: whether it has ended; new_tokens: how many it was given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        cache: Cache,
        stops: frozenset[int],
        *,
        pick: Picks = greedy_rows,
        until: Sequence[str] = LINE,
    ) -> None:
        self.model, self.cache, self.stops, self.until = model, cache, stops, tuple(until)
        rows = cache.kv_layers[0].lanes
        self.steps, self.new_tokens, self.over = [0] * rows, [0] * rows, [False] * rows
        self._pick = pick
        self._streams = [TextStream(tokenizer) for _ in range(rows)]

    @property
    def texts(self) -> list[str]:
        """The answers so far, without what ended them."""
        return [cut(stream.text, self.until) for stream in self._streams]

    def stream(self, logits: Tensor, rests: Sequence[Sequence[int]], limit: int) -> Iterator[list[str | None]]:
        """The text that each token adds, a list of all rows a step, None for a row that got no token in it.

        rests: of each row, tokens that are not in the cache yet; a sparse cache takes them one by one, so that each attends under
        the budget. logits [B, V]: those after the last token of the cache, used where a row's rest is empty.
        """
        pending = [deque(rest) for rest in rests]
        together = self.cache.settings.method.dense and len({len(rest) for rest in rests}) == 1
        if together and pending[0]:
            logits = forward_rows(self.model, self.cache, rests)
            self.steps = [len(rest) for rest in rests]
            pending = [deque() for _ in rests]
        tokens = [0] * len(rests)
        while True:
            best = self._pick(logits) if not all(pending) else tokens
            pieces: list[str | None] = [None] * len(rests)
            for row, rest in enumerate(pending):
                if rest:
                    tokens[row] = rest.popleft()
                elif not self.over[row]:
                    tokens[row] = best[row]
                    pieces[row] = self._take(row, best[row], limit)
            yield pieces
            if all(self.over):
                return
            logits = forward_rows(self.model, self.cache, [[token] for token in tokens])
            self.steps = [count + (not over) for count, over in zip(self.steps, self.over, strict=True)]

    def _take(self, row: int, token: int, limit: int) -> str | None:
        """A row's next token. Returns the text it adds, None for a stop."""
        if token in self.stops or limit < 1:
            self.over[row] = True
            return None
        stream, most = self._streams[row], positions(self.model)
        before = cut(stream.shown, self.until)
        stream.push(token)
        self.new_tokens[row] += 1
        full = most is not None and self.cache.kv_layers[0].length(row) >= most
        self.over[row] = self.new_tokens[row] >= limit or full or ended(stream.shown, self.until)
        return cut(stream.shown, self.until)[len(before) :]


class Answer:
    """One answer from a cache of one row; see Answers."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, cache: Cache, stops: frozenset[int], **how: Any) -> None:
        self._rows = Answers(model, tokenizer, cache, stops, **how)

    @property
    def text(self) -> str:
        """The answer so far, without what ended it."""
        return self._rows.texts[0]

    def stream(self, logits: Tensor, question: Sequence[int], limit: int) -> Iterator[str]:
        """The text that each token adds. logits [V]: those after the last token of the cache, used where question is empty."""
        for (piece,) in self._rows.stream(torch.as_tensor(logits)[None], [question], limit):
            if piece is not None:
                yield piece


def ended(text: str, until: Sequence[str] = LINE) -> bool:
    """Whether an answer has come to one of the texts that end it; those before its first word do not count."""
    body = text.lstrip()
    return any(end in body for end in until)


def cut(text: str, until: Sequence[str] = LINE) -> str:
    """An answer up to the first text that ends it."""
    start = len(text) - len(text.lstrip())
    found = [at for end in until if (at := text.find(end, start)) >= 0]
    return text[: min(found)] if found else text
