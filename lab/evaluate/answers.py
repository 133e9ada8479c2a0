"""Answers from a cache that holds contexts: many rows decode together, and each ends on its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvthaw.engine.decode import Tokens, decode, forward
from kvthaw.engine.generation_config import stop_tokens
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import positions
from kvthaw.engine.sampling import GREEDY, Sampler, Sampling
from kvthaw.engine.text import Detokenizer
from kvthaw.errors import ConfigError


class AnswerText(Detokenizer):
    """The text of an answer. Stop strings before its first word do not end it, if `after_first_word`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, after_first_word: bool = False) -> None:
        super().__init__(tokenizer, stops)
        self._begun = not after_first_word

    def _search(self, piece: str) -> str:
        lead = "" if self._begun else piece[: len(piece) - len(piece.lstrip())]
        self._begun = self._begun or lead != piece
        return lead + super()._search(piece[len(lead) :])


class Answers:
    """The answers of a cache's rows: the rest of the prompt, then decoding to a stop token, a stop string, or the limit.

    A row's tokens depend on no other row; one that has ended waits for the rest.
    sampling: how all rows draw, or one for each. Raises ConfigError for penalties, a bias, a grammar or min_tokens, and
        ValueError if the numbers of rows differ.
    until, after_first_word: the stop strings, as for AnswerText.
    steps: how many tokens each row has sent through the model.
    over: whether it has ended, and stopped: by a stop, not at the limit.
    new_tokens: how many it was given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        cache: Cache,
        *,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        until: Sequence[str] = ("\n",),
        after_first_word: bool = True,
    ) -> None:
        self.model, self.cache = model, cache
        rows = cache.kv.sequences.count
        self.steps, self.new_tokens, self.over, self.stopped = [0] * rows, [0] * rows, [False] * rows, [False] * rows
        self._stops = stop_tokens(model, tokenizer)
        self._sampling = [sampling] * rows if isinstance(sampling, Sampling) else list(sampling)
        if len(self._sampling) != rows:
            raise ValueError(f"{rows} rows of a cache and settings for {len(self._sampling)}")
        for one in self._sampling:
            if one.penalized or one.logit_bias or one.min_tokens or one.grammar:
                raise ConfigError(f"{one} needs the tokens so far, which a cache's rows do not keep; a Batch does")
        self._sampler: Sampler | None = None
        self._texts = [AnswerText(tokenizer, until, after_first_word=after_first_word) for _ in range(rows)]

    @property
    def texts(self) -> list[str]:
        """The answers so far, without what ended them."""
        return [text.text for text in self._texts]

    def stream(self, logits: Tensor, rests: Sequence[Sequence[int]], limit: int) -> Iterator[list[str | None]]:
        """Yield the text that each step adds to each row, None for a row that got no token in it.

        rests: of each row, tokens that are not in the cache yet; a sparse cache takes them one by one, so that each attends under
        the budget. logits [B, V]: after the last token of the cache, used where a row's rest is empty.
        """
        if self.cache.settings.method.dense and rests[0] and len({len(rest) for rest in rests}) == 1:
            logits = forward(self.model, self.cache, rests)
            self.steps, rests = [len(rest) for rest in rests], [[]] * len(rests)
        pending, tokens = [deque(rest) for rest in rests], [0] * len(rests)
        pieces: list[str | None] = []

        def choose(after: Tensor) -> Tokens:
            drawn = tokens if all(pending) else self._draw(after)
            pieces[:] = [None] * len(tokens)
            for row, rest in enumerate(pending):
                if rest:
                    tokens[row] = rest.popleft()
                elif not self.over[row]:
                    tokens[row] = drawn[row]
                    pieces[row] = self._take(row, drawn[row], limit)
            return tokens

        for _ in decode(self.model, self.cache, logits, choose):
            yield list(pieces)
            if all(self.over):
                return
            self.steps = [count + (not over) for count, over in zip(self.steps, self.over, strict=True)]

    def _draw(self, logits: Tensor) -> list[int]:
        sequences = self.cache.kv.sequences
        at = torch.tensor([sequences.length(row) for row in range(sequences.count)], device=logits.device)
        if self._sampler is None:
            self._sampler = Sampler(len(self._sampling), logits.shape[1], logits.device)
            for row, sampling in enumerate(self._sampling):
                self._sampler.join(row, sampling)
        drawn: list[int] = self._sampler(logits, at).tokens.tolist()
        return drawn

    def _take(self, row: int, token: int, limit: int) -> str | None:
        """Append a row's next token. Return the text that it adds, or None for a stop."""
        text = self._texts[row]
        if token in self._stops or limit < 1:
            self.over[row] = self.stopped[row] = True
            text.finish()
            return None
        piece, most = text.push(token), positions(self.model)
        self.new_tokens[row] += 1
        full = most is not None and self.cache.kv.sequences.length(row) >= most
        self.stopped[row] = text.stopped_by is not None
        self.over[row] = text.stopped_by is not None or full or self.new_tokens[row] >= limit
        return piece + text.finish() if self.over[row] else piece


def spoken(text: str, stops: Sequence[str] = ()) -> str:
    """Return a model's output after its thoughts, if any, up to the first stop string that follows its first word."""
    said = text.rpartition("</think>")[2].lstrip() if "</think>" in text else text
    return said[
        : min((at for stop in stops if (at := said.find(stop, len(said) - len(said.lstrip()))) >= 0), default=len(said))
    ]
