"""Perplexity by position, over a text that every method decodes: `python -m lab eval perplexity`.

As in ClusterKV's figure 10: prompts of growing length from one book are prefilled at once. The book's next tokens are then
decoded one by one (teacher-forced), so that every counted prediction uses the method's budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvthaw.engine.decode import feed
from kvthaw.engine.hf.model import check_prompt
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.evaluator import Evaluator, Piece
from kvthaw.evaluate.files import opening, text_name, tokens_of
from kvthaw.evaluate.machine import now, versions
from kvthaw.evaluate.prefills import Prefilled, Tell
from kvthaw.evaluate.probe import PerRequestStats
from kvthaw.evaluate.results import BYTES, Record, Setting, asked_budget, largest, means, shared
from kvthaw.evaluate.variant import Variant, setting_of
from kvthaw.formatting import counted


@dataclass(frozen=True, slots=True)
class Course:
    """The positions of a text to measure.

    length: tokens before a stretch, including the opening ones.
    steps: predictions of a stretch.
    samples: number of starting points in the text. Seed 0 starts at its beginning, other seeds at a random place.
    text: None is the shipped book.
    """

    length: int
    steps: int = 64
    samples: int = 1
    seed: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        at_least(1, length=self.length, steps=self.steps, samples=self.samples)
        at_least(0, seed=self.seed)

    def __str__(self) -> str:
        return f"perplexity {self.length:,}"

    @property
    def tokens(self) -> int:
        """How many tokens of a text a sample takes."""
        return self.length + self.steps + 1


def summarize(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any]:
    """Pool the records of a variant at one length, and full attention's on the same samples in the same order, if available.

    nll: the mean in nats per token.
    perplexity: its exponential.
    difference: difference to full attention's nll on the same tokens. difference_95: its 95 % normal interval over all
        tokens.
    """
    own = [value for record in records for value in record["nll"]]
    nll = sum(own) / len(own)
    return {
        **shared(records, "method", "retrieved", "dense_layers", "length", "steps"),
        "budget": asked_budget(records[0]),
        "n": len(records),
        "nll": nll,
        "perplexity": math.exp(nll),
        **_apart(own, [value for record in full for value in record["nll"]]),
        **means(records, "attended_mean"),
        **largest(records, "attended_max", *BYTES),
        "seconds": sum(record["seconds"] for record in records),
        "seed": min(record["seed"] for record in records),
        **shared(records, "text", "model", "weights", "dtype", "device", "versions"),
    }


def _apart(own: list[float], theirs: list[float]) -> dict[str, Any]:
    if not theirs:
        return dict.fromkeys(("full_nll", "full_perplexity", "difference", "difference_95"))
    apart = [a - b for a, b in zip(own, theirs, strict=True)]
    full_nll, change = (sum(values) / len(values) for values in (theirs, apart))
    spread = 1.96 * math.sqrt(sum((value - change) ** 2 for value in apart) / max(1, len(apart) - 1) / len(apart))
    found = {"full_nll": full_nll, "full_perplexity": math.exp(full_nll), "difference": change}
    return {**found, "difference_95": (change - spread, change + spread)}


class Reader(Evaluator[Course, int]):
    """Stretches of texts: see Evaluator. A sample's place is its seed."""

    def __init__(self, *given: Any, batch: int | None = None, **how: Any) -> None:
        super().__init__(*given, batch=batch, **how)
        self._bodies: dict[str | None, list[int]] = {}  # the tokens of texts, which every setting asks for

    def check(self, work: Course) -> None:
        check_prompt(self.model, work.tokens - 1)
        self._body(work)

    def places(self, work: Course) -> range:
        return range(work.seed, work.seed + work.samples)

    def rows(self, work: Course) -> int:
        return self.sharing.at(work.tokens)

    def settings(self, work: Course, variant: Variant, places: Sequence[int]) -> list[list[Setting]]:
        """Return the settings that records depend on.

        start: the token of the text at which a sample begins.
        """
        of = {"steps": work.steps, "text": text_name(work.text), "length": work.length}
        same = {**self.same, **setting_of(variant), **of}
        return [[{**same, "seed": seed, "start": self._place(work, seed)[0]}] for seed in places]

    def compute(self, piece: Piece[Course, int], tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        course, length = piece.work, piece.work.length
        texts = [self._place(course, seed)[1] for seed in piece.places]
        for prefilled in self.prefills.of(piece.variants, [ids[:length] for ids in texts], tell):
            settings = [one for (one,) in self.settings(course, prefilled.variant, piece.places)]
            yield self._read(settings, prefilled, [ids[length:] for ids in texts], tell)

    def _place(self, course: Course, seed: int) -> tuple[int, list[int]]:
        """Return where in the text a sample begins, and its tokens."""
        first, body = opening(self.tokenizer), self._body(course)
        needed = max(0, course.tokens - len(first))
        start = random.Random(seed).randint(0, len(body) - needed) if seed else 0
        return start, [*first, *body[start : start + needed]][: course.tokens]

    def _body(self, course: Course) -> list[int]:
        """Return the tokens of a text. Raises ConfigError for one that is too short: it does not start over, for that would be
        predicted from its first reading."""
        if course.text not in self._bodies:
            self._bodies[course.text] = tokens_of(self.tokenizer, course.text)
        body = self._bodies[course.text]
        if course.tokens - len(opening(self.tokenizer)) > len(body):
            most = f"length and steps take {course.tokens:,} tokens"
            raise ConfigError(f"the text has {counted(len(body), 'token')}; {most}: take fewer, or a longer text")
        return body

    def _read(
        self,
        settings: list[Setting],
        prompts: Prefilled,
        texts: list[list[int]],
        show: Tell,
    ) -> list[Record]:
        """Send each row's text but its last token through a fork, one by one, and score all tokens but the first."""
        doing, steps = str(prompts.variant), settings[0]["steps"]
        show(0, steps, doing)
        start = now(self.model.device)
        cache = prompts.make()
        counts, nll = PerRequestStats(cache), list[Tensor]()
        tokens = torch.tensor(texts, device=self.model.device)[:, : steps + 1]
        for sent, logits in enumerate(feed(self.model, cache, tokens[:, :steps]), 1):
            scores = torch.log_softmax(logits.float(), dim=-1)
            nll.append(-scores.gather(1, tokens[:, sent : sent + 1])[:, 0])
            show(sent, steps, doing)
        stats = counts.rows([steps] * len(texts))
        counts.detach()
        cache.layers.clear()  # its rows go before the next one's come
        seconds = (now(self.model.device) - start) / len(texts)
        return [
            Record(
                setting,
                {
                    "nll": [round(value, 6) for value in values],
                    **{name: value for name, value in row.items() if name in _MEASURES},
                    "seconds": seconds,
                    "versions": versions(),
                },
            )
            for setting, row, values in zip(settings, stats, torch.stack(nll, dim=1).tolist(), strict=True)
        ]


_MEASURES = ("held_budget", "attended_mean", "attended_max", *BYTES)
