"""BABILong (Kuratov et al., 2024): the facts of a bAbI story (Weston et al., 2015) hidden in a book, and a question about them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from lab.evaluate.assets import ASSETS, read_own

from .base import Haystack, Sample, Task, fit

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES),
    "qa5": ("bill", "fred", "jeff", "mary", "apple", "football", "milk"),
}
"""What an answer can be."""
SPREAD = 0.02
"""Distance between consecutive facts if a depth is given, as a share of the text."""


@dataclass(frozen=True)
class Story:
    """Facts in their order, a question, its answer, and the indices of the facts that give it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    needed: tuple[int, ...]


@dataclass(frozen=True)
class BabiLong:
    """One of bAbI's tasks, `qa1` to `qa5`, in BABILong's prompt with instruction and examples."""

    task: str
    path: Path = ASSETS / "babilong"
    max_new_tokens: int = 20
    stops: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """babilong_qa1 and so on."""
        return f"babilong_{self.task}"

    def reading(self, path: Path) -> Task:
        """See Reads; a file of bAbI v1.2 or the folder that holds them, test files before others."""
        self._stories(path)
        return BabiLong(self.task, path)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word. Facts keep their order at random places. With `depth` they follow one another
        closely, and the first needed fact is at that depth. The sample's depth is that fact's. Questions repeat once all
        were used."""
        stories, rng = self._stories(self.path), random.Random(seed)
        turn, place = divmod(seed, len(stories))
        story = random.Random(turn).sample(stories, len(stories))[place]
        first = story.needed[0]
        if depth is None:
            places = sorted(rng.random() for _ in story.facts)
        else:
            places = [min(1.0, max(0.0, depth + SPREAD * (i - first))) for i in range(len(story.facts))]
        words = Haystack.of(text)
        prompt = json.loads(read_own("babilong/prompts.json"))[self.task]
        head = f"{prompt['instruction']}\n{prompt['examples']}\n{prompt['post_prompt']}\n<context>\n"
        tail = f"\n</context>\nQuestion: {story.question}"

        def build(n: int, spare: str) -> Sample:
            body = words.with_facts(n, list(story.facts), places, spare)
            return Sample(head + body, tail, (story.answer,), _last_of(body, story.facts[: first + 1]) / max(1, len(body)))

        return fit(tokenizer, length, build)

    def score(self, sample: Sample, output: str) -> float:
        """Return 1 if the first sentence of the output holds the answer and no other label, except labels of the question."""
        said = output.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
        labels = {label for label in LABELS[self.task] if label in said and label not in sample.question.lower()}
        return float(labels == {sample.answers[0].lower()})

    def _stories(self, path: Path) -> tuple[Story, ...]:
        return read_stories(self._file(path))

    def _file(self, path: Path) -> Path:
        if not path.is_dir():
            return path
        found = sorted(path.glob(f"{self.task}_*.txt"), key=lambda file: ("_test" not in file.name, file.name))
        if not found:
            raise ConfigError(f"data is {str(path)!r}; it holds no file {self.task}_*.txt")
        return found[0]


@cache
def read_stories(file: Path) -> tuple[Story, ...]:
    """Return the questions of a file of bAbI v1.2, each with the facts before it. Raises ConfigError for any other file."""
    stories: list[Story] = []
    facts: dict[int, str] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, said = line.strip().partition(" ")
            if number == "1":
                facts = {}
            if "\t" not in said:
                facts[int(number)] = said
                continue
            question, answer, needed = (part.strip() for part in said.split("\t"))
            order = list(facts)
            indices = tuple(sorted(order.index(int(one)) for one in needed.split()))
            stories.append(Story(tuple(facts.values()), question, answer, indices))
    except ValueError as error:
        raise ConfigError(f"data is {str(file)!r}; it is not a file of bAbI v1.2: {error}") from error
    if not stories or not all(story.needed for story in stories):
        raise ConfigError(f"data is {str(file)!r}; a question of bAbI v1.2 is a line of question, answer and fact numbers")
    return tuple(stories)


def _last_of(text: str, facts: tuple[str, ...]) -> int:
    """Return the offset of the last of some consecutive facts in a text, where the same words may occur earlier, too."""
    begin, end = 0, 0
    for fact in facts:
        begin = text.index(fact, end)
        end = begin + len(fact)
    return begin


GENERATORS = tuple(BabiLong(task) for task in LABELS)
