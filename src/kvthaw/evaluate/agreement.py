"""Compare methods' next-token distributions with full attention's on one's own prompts: `kvthaw eval agreement`.

Full attention answers each prompt greedily, or the tokens of a text are taken. Every method then decodes the same tokens in
a fork of the prefilled cache. All compared distributions therefore follow the same tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvthaw.engine.chat_template import Chat, following, split_prompt
from kvthaw.engine.decode import feed
from kvthaw.engine.generation_config import stop_tokens
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt, positions
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.evaluator import Evaluator, Piece
from kvthaw.evaluate.files import opening, tokens_of
from kvthaw.evaluate.machine import now, versions
from kvthaw.evaluate.prefills import Tell
from kvthaw.evaluate.probe import PerRequestStats
from kvthaw.evaluate.results import BYTES, Record, Setting, asked_budget, largest, means, shared
from kvthaw.evaluate.variant import FULL, Variant, setting_of
from kvthaw.formatting import counted

STEPS = 16
"""Tokens compared after a prompt, if nothing else is said."""
LENGTH = 2048
"""Most tokens of a window, if nothing else is said."""
RESAMPLES = 2000
"""Bootstrap resamples of the prompts for an interval."""
_MEASURES = ("held_budget", "attended_mean", "attended_max", *BYTES)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is prefilled.

    follows: the tokens that are sent then; None: full attention's greedy answer.
    """

    tokens: tuple[int, ...]
    follows: tuple[int, ...] | None = None
    cut: bool = False

    @property
    def name(self) -> str:
        """A hash of all that it holds."""
        return hashlib.blake2b(repr((self.tokens, self.follows)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prompts, and how many tokens after each are compared."""

    prompts: tuple[Prompt, ...]
    steps: int = STEPS

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, prompts=len(self.prompts))

    def __str__(self) -> str:
        return "agreement"


def usual_length(tokenizer: Any, text: str) -> int:
    """Return the tokens of a window if the user names none: 2,048, or half of a text that has less than twice that."""
    return max(1, min(LENGTH, len(tokens_of(tokenizer, text)) // 2))


def windows(tokenizer: Any, text: str, length: int, count: int, steps: int) -> list[Prompt]:
    """Return `count` pieces of `length` tokens, spread evenly over a text, each with the text that follows.

    Raises ConfigError for a text that is shorter than one piece.
    """
    first, body = opening(tokenizer), tokens_of(tokenizer, text)
    taken = max(1, length - len(first))
    starts = _starts(len(body), taken + steps, count, f"a window of {length:,} and the {steps:,} compared do not fit it")
    return [Prompt((*first, *body[a : a + taken]), tuple(body[a + taken : a + taken + steps])) for a in starts]


def questions(tokenizer: Any, text: str, question: str, length: int, count: int, chat: Chat | None) -> list[Prompt]:
    """Return prompts of at most `length` tokens: pieces of a text, spread evenly over it, each followed by a question.

    Raises ConfigError for a text that is shorter than one piece, and for a length that the question alone fills.
    """

    def ask(stretch: list[int]) -> list[int]:
        document = tokenizer.decode(stretch)
        return _whole(tokenizer, document, following(document, question), chat)

    body = tokens_of(tokenizer, text)
    taken = length - len(ask([]))
    if taken < 1:
        raise ConfigError(f"length is {length}; the question alone takes {length - taken}: take a greater length")
    found = []
    for a in _starts(len(body), taken, count, f"a window of {length:,} takes {taken:,} of it, with the question"):
        stretch = body[a : a + taken]
        while len(tokens := ask(stretch)) > length:
            stretch = stretch[: len(stretch) - (len(tokens) - length)]
        found.append(Prompt(tuple(tokens)))
    return found


def whole_prompts(tokenizer: Any, texts: Iterable[str], most: int, chat: Chat | None) -> list[Prompt]:
    """Return texts as prompts. One of more than `most` tokens loses its middle."""
    found = []
    for text in texts:
        tokens = _whole(tokenizer, "", text, chat)
        cut = len(tokens) > most
        kept = [*tokens[: most // 2], *tokens[len(tokens) - (most - most // 2) :]] if cut else tokens
        found.append(Prompt(tuple(kept), cut=cut))
    return found


def longest(model: Any, steps: int) -> int:
    """Return the most tokens of a prompt that leaves room for `steps` more. Raises ConfigError if there is no room."""
    limit = positions(model)
    if limit is None:
        return (1 << 31) - 1 - steps
    if limit <= steps:
        raise ConfigError(f"tokens is {steps:,}; the model's positions end at {limit:,}: take fewer")
    return limit - steps


def divergence(full: Tensor, other: Tensor) -> Tensor:
    """Return KL(full || other) in nats [...] of the next-token distributions that logits [..., V] give."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (full, other))
    weighed = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))  # a token that full attention rules out counts nothing
    return weighed.sum(-1).clamp_min(0.0)


def summarize(records: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """Pool the records of a variant.

    kl: the mean in nats a token. kl_95: its bootstrap interval over prompts, see `interval`. kl_p99: the 99th percentile of tokens.
    same_top: the share of tokens whose likeliest next token is full attention's.
    """
    kl = [value for record in records for value in record["kl"]]
    same = [value for record in records for value in record["same_top"]]
    return {
        **shared(records, "method", "retrieved", "dense_layers", "steps", "answer"),
        "budget": asked_budget(records[0]),
        "n": len(records),
        "tokens": len(kl),
        "lengths": sorted({record["length"] for record in records}),
        "kl": sum(kl) / len(kl),
        "kl_95": interval([record["kl"] for record in records], seed),
        "kl_p99": sorted(kl)[-(-99 * len(kl) // 100) - 1],
        "same_top": sum(same) / len(same),
        **means(records, "attended_mean"),
        **largest(records, "attended_max", *BYTES),
        "seconds": sum(record["seconds"] for record in records),
        **shared(records, "model", "weights", "dtype", "device", "versions"),
    }


def interval(values: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of a mean over tokens, resampled by prompt; None for a single prompt."""
    if len(values) < 2:
        return None
    rng, sums = random.Random(seed), [(sum(some), len(some)) for some in values]
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(sums, k=len(sums))
        found.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    found.sort()
    return found[round(0.025 * (RESAMPLES - 1))], found[round(0.975 * (RESAMPLES - 1))]


class Agreement(Evaluator[Comparison, int]):
    """Prompts under full attention and variants: see Evaluator. A sample's place is its index among the prompts."""

    def __init__(self, *given: Any, batch: int | None = None, **how: Any) -> None:
        super().__init__(*given, batch=batch, **how)

    def check(self, work: Comparison) -> None:
        for prompt in work.prompts:
            check_prompt(self.model, len(prompt.tokens) + work.steps)

    def places(self, work: Comparison) -> range:
        return range(len(work.prompts))

    def rows(self, work: Comparison) -> int:
        return self.sharing.at(max(len(prompt.tokens) for prompt in work.prompts) + work.steps)

    def settings(self, work: Comparison, variant: Variant, places: Sequence[int]) -> list[list[Setting]]:
        """Return what records depend on."""
        same = {**self.same, **setting_of(variant), "eval": "agreement", "steps": work.steps}
        found = []
        for place in places:
            prompt = work.prompts[place]
            answer = "greedy" if prompt.follows is None else "text"
            found.append([{**same, "prompt": prompt.name, "length": len(prompt.tokens), "answer": answer}])
        return found

    def compute(self, piece: Piece[Comparison, int], tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        work, prompts = piece.work, [piece.work.prompts[place] for place in piece.places]
        full: _Followed | None = None
        others = [variant for variant in piece.variants if variant != FULL]
        for prefilled in self.prefills.of([FULL, *others], [list(prompt.tokens) for prompt in prompts], tell):
            doing = str(prefilled.variant)
            tell(0, work.steps, doing)
            start = now(self.model.device)
            cache = prefilled.make()
            counts = PerRequestStats(cache)
            if full is None:
                full = self._follow(cache, prefilled.logits, prompts, work.steps)
                logits: Iterable[Tensor] = full.logits
            else:
                logits = feed(self.model, cache, full.tokens)
            kl, same = list[Tensor](), list[Tensor]()
            for sent, (own, theirs) in enumerate(zip(logits, full.logits, strict=True), 1):
                kl.append(divergence(theirs, own))
                same.append(own.argmax(-1) == theirs.argmax(-1))
                tell(sent, work.steps, doing)
            stats = counts.rows([work.steps] * len(prompts))
            counts.detach()
            cache.layers.clear()  # its rows go before the next one's come
            if prefilled.variant not in piece.variants:
                continue
            seconds = (now(self.model.device) - start) / len(prompts)
            settings = self.settings(work, prefilled.variant, piece.places)
            columns = zip(
                settings, stats, full.counted, torch.stack(kl, 1).tolist(), torch.stack(same, 1).tolist(), strict=True
            )
            yield [
                Record(
                    setting,
                    {
                        "kl": [float(f"{value:.6g}") for value in values[:n]],
                        "same_top": [int(value) for value in tops[:n]],
                        **{name: value for name, value in row.items() if name in _MEASURES},
                        "seconds": seconds,
                        "versions": versions(),
                    },
                )
                for (setting,), row, n, values, tops in columns
            ]

    def _follow(self, cache: Cache, logits: Tensor, prompts: Sequence[Prompt], steps: int) -> _Followed:
        """Send what follows each prompt through full attention: the text's tokens, or the likeliest ones."""
        given = [prompt.follows for prompt in prompts]
        ends, seen, sent = stop_tokens(self.model, self.tokenizer), list[Tensor](), list[list[int]]()
        current = logits
        for step in range(steps):
            likeliest = current.argmax(-1).tolist()
            sent.append([own if text is None else text[step] for own, text in zip(likeliest, given, strict=True)])
            current = next(feed(self.model, cache, torch.tensor(sent[-1])[:, None])).clone()
            seen.append(current)
        tokens = list(map(list, zip(*sent, strict=True)))
        counted = [
            steps if text is not None else max(1, next((i for i, token in enumerate(row) if token in ends), steps))
            for row, text in zip(tokens, given, strict=True)
        ]
        return _Followed(torch.tensor(tokens), seen, counted)


@dataclass(frozen=True, slots=True)
class _Followed:
    """What follows prompts. tokens [B, n].

    logits: [B, V] after each.
    counted: how many of each row come before its end.
    """

    tokens: Tensor
    logits: list[Tensor]
    counted: list[int]


def _starts(tokens: int, taken: int, count: int, what: str) -> list[int]:
    if tokens < taken:
        raise ConfigError(f"the text has {counted(tokens, 'token')}; {what}: give a smaller length, or a longer text")
    room = tokens - taken
    return list(dict.fromkeys(room * i // max(1, count - 1) for i in range(count)))


def _whole(tokenizer: Any, context: str, question: str, chat: Chat | None) -> list[int]:
    before, after = split_prompt(tokenizer, context, question, chat)
    return before + after
