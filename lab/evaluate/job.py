"""A task's job: samples under many methods and budgets, in pieces that run as one batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from kvthaw.engine.chat_template import Chat
from kvthaw.errors import ConfigError, at_least
from lab.evaluate.tasks import Task, find

T = TypeVar("T")
Question = Literal["dense", "sparse"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
"""Ways to ask; see Job."""
THINKING = 4096
"""Default for the tokens of an answer with its thoughts."""
LEAD = 24
"""Tokens of an answer through a chat template beyond the task's own: a model answers in a sentence there, which begins with the
question's words."""
EVEN_DEPTHS = tuple(i / 100 for i in range(0, 100, 5))
"""0 to 95 % in steps of 5."""


def check_question(question: str) -> None:
    """Raise ConfigError for one that is none of QUESTIONS."""
    if question not in QUESTIONS:
        raise ConfigError(f"question is {question!r}; it must be {' or '.join(QUESTIONS)}")


def template_setting(chat: Chat) -> dict[str, Any]:
    """Return the given options of the chat template, on which a record depends."""
    return {name: value for name, value in asdict(chat).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Job:
    """Samples of one task at one length.

    length: tokens of context and question.
    depths: depths of the samples' facts, 0..1, equally often. If empty, the task chooses.
    question: "dense" prefills it with the context. "sparse" prefills the context alone and decodes the question's tokens
        one by one with sparse attention.
    probe: observe every n-th step, 0 for none.
    text: the haystack; None is the shipped book.
    data: files with the task's questions; None is the shipped ones.
    chat: ask through the chat template, whose tokens length does not count.
    max_new_tokens: the longest answer, thoughts included; None: the task's, plus LEAD through a chat template, or THINKING
        if thinking is on.
    """

    task: str
    length: int
    samples: int
    seed: int = 0
    depths: tuple[float, ...] = EVEN_DEPTHS
    question: Question = "dense"
    probe: int = 2
    text: str | None = None
    data: Path | None = None
    chat: Chat | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        find(self.task)
        check_question(self.question)
        at_least(1, length=self.length, samples=self.samples, max_new_tokens=self.max_new_tokens)
        at_least(0, probe=self.probe)
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"a depth is {depth}; it must lie between 0 and 1")

    def __str__(self) -> str:
        return f"{self.task} {self.length:,}"

    @property
    def thinks(self) -> bool:
        """Whether thinking is switched on."""
        return self.chat is not None and self.chat.thinking is True

    def limit(self, task: Task) -> int:
        """Return the most tokens of an answer."""
        lead = 0 if self.chat is None else LEAD
        return self.max_new_tokens or (THINKING if self.thinks else task.max_new_tokens + lead)

    def cells(self) -> list[tuple[int, float | None]]:
        """(seed, depth) of every sample.

        A larger number of samples starts with the same samples. Few samples are spread over the depths too: each is about
        0.618 of the range after the one before.
        """
        if not self.depths:
            return [(self.seed + i, None) for i in range(self.samples)]
        count = len(self.depths)
        step = next(step for step in itertools.count(round(0.618 * count)) if math.gcd(step, count) == 1)
        return [(self.seed + i, self.depths[i * step % count]) for i in range(self.samples)]


SampleKey = tuple[int, float | None]
"""Seed and depth of a sample."""
