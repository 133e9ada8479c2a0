"""Several drawn answers to one prompt at once: its cache becomes a batch, a row an answer, and rows leave as they end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.evaluate.decode import forward
from kvthaw.evaluate.model import positions

from .base import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvthaw.engine.hf import Cache


@dataclass(slots=True)
class Answer:
    """What was generated. ended: by a stop token or string, not by the limit."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


def draw(logits: Tensor, plan: Plan, uniform: Tensor) -> Tensor:
    """A token for every row of logits [B, V]: [B]. The same numbers `uniform` [B], 0 <= u < 1, draw the same tokens.

    Temperature 0 takes the likeliest. Otherwise: softmax of logits / temperature, cut to the fewest likeliest tokens whose sum
    reaches top_p (nucleus sampling; Holtzman et al., 2020), by the inverse of their distribution.
    """
    if plan.temperature == 0:
        return logits.argmax(dim=-1)
    weights, tokens = torch.softmax(logits.float() / plan.temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    total = weights.cumsum(dim=-1)
    kept = torch.where(total - weights < plan.top_p, weights, 0.0).cumsum(dim=-1)
    place = torch.searchsorted(kept, uniform.to(kept)[:, None] * kept[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.gather(1, place)[:, 0]


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: Cache,
    logits: Tensor,
    question: Sequence[int],
    plan: Plan,
    draws: Sequence[random.Random],
    stop_tokens: frozenset[int],
    progress: Callable[[int], None] | None = None,
) -> list[Answer]:
    """One answer for each of `draws` to the prompt in a cache of one row, which is of no use afterwards.

    logits [V]: after the cache's last token, used where `question` is empty. question: tokens not in the cache yet; a sparse cache
    takes them one by one, so that each attends under the budget. An answer ends before a stop string or token, at the plan's limit
    or at the model's last position. A row draws what it would draw alone. progress(steps) is called after every step. Raises
    ConfigError without draws.
    """
    if not draws:
        raise ConfigError("no answer was asked for")
    whole = cache.settings.method.dense
    for part in [list(question)] if whole and question else [[token] for token in question]:
        logits = forward(model, cache, part)
    answers = [Answer() for _ in draws]
    if len(answers) > 1:
        cache.batch_repeat_interleave(len(answers))
    stops, most = Stops(tokenizer, plan.stops), positions(model)
    rows, scores = list(range(len(answers))), logits.expand(len(answers), -1)
    for step in range(1, plan.max_new_tokens + 1):
        uniform = torch.tensor([draws[row].random() for row in rows])
        drawn = draw(scores, plan, uniform).tolist()
        going = []
        for place, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            answer = answers[row]
            if token in stop_tokens:
                answer.ended = True
                continue
            answer.tokens.append(token)
            answer.ended = stops.ended(answer.tokens)
            if not answer.ended:
                going.append(place)
        if progress is not None:
            progress(step)
        if not going or step == plan.max_new_tokens or (most is not None and cache.get_seq_length() >= most):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(torch.tensor(going))
        rows, drawn = [rows[place] for place in going], [drawn[place] for place in going]
        tokens = torch.tensor(drawn, device=model.device)[:, None]
        scores = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    for answer in answers:
        answer.text = stops.cut(tokenizer.decode(answer.tokens, skip_special_tokens=True))
    return answers


class Stops:
    """The strings that end an answer. Only its last tokens are looked at, since decoding all of it at every step is quadratic."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self.strings = tokenizer, tuple(strings)
        self._tail = max((len(text.encode()) for text in self.strings), default=0) + 8  # a token is a byte at least

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens hold a stop string."""
        if not self.strings:
            return False
        text = self._tokenizer.decode(tokens[-self._tail :], skip_special_tokens=True)
        return any(stop in text for stop in self.strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string in it."""
        return text[: min((at for at in map(text.find, self.strings) if at >= 0), default=len(text))]
