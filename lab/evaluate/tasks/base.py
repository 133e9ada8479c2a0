"""The parts that every task shares: samples, scores, and prompts of a given number of tokens."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvthaw.evaluate.files import read_asset
from lab.evaluate.assets import read_own

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

ROOM = 8
"""Tokens that a prompt may always lack: words of a few tokens cannot make every number."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One long-context question."""

    context: str  # what is cached first
    question: str  # what follows the context; prompt = context + question
    answers: tuple[str, ...]  # what the task's score compares an output with
    depth: float | None  # depth of the (first) fact, 0..1 of the context

    @property
    def prompt(self) -> str:
        """Context and question in one text."""
        return self.context + self.question


class Task(Protocol):
    """A family of questions: made at any length, or read from files and made or cut to it."""

    @property
    def name(self) -> str:
        """The name in TASKS."""

    @property
    def max_new_tokens(self) -> int:
        """Enough for a whole answer under the shipped tokenizer, or the published evaluation's limit."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer and are no part of it; those before its first word do not count."""

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """Return a sample whose prompt has `length` tokens, special tokens included.

        Its haystack has the most units that fit. Under a tokenizer that cannot hit the length exactly, the prompt has at
        most 1 % or ROOM tokens less.

        A unit is a word of a text haystack, or a record of a record haystack; a few words fill the rest. A prompt that a
        file holds whole is unchanged, and at most `length` tokens long. Equal arguments give equal samples. Raises
        ValueError, with the allowed lengths, if not even an empty haystack fits.

        depth: place of the fact, 0..1; None: drawn from the seed.
        text: the haystack; None: the shipped book.
        """

    def score(self, sample: Sample, output: str) -> float:
        """How right `output` is, 0..1, by the published metric."""


@runtime_checkable
class Reads(Protocol):
    """A task that can take its questions from files instead of what ships."""

    def reading(self, path: Path) -> Task:
        """Return the same task over the file or folder `path`. Raises ConfigError with its name if it holds no such questions."""


def holds(output: str, answer: str) -> bool:
    """Return whether `output` contains `answer` as a whole, not inside a longer number, word or hyphenated key."""
    return re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w]|-\w)", output) is not None


def score_answers(sample: Sample, output: str) -> float:
    """Return the share of `sample.answers` that `output` holds."""
    return sum(holds(output, answer) for answer in sample.answers) / len(sample.answers)


class Whole:
    """A task scored by the share of its answers that the output contains as whole words."""

    def score(self, sample: Sample, output: str) -> float:
        return score_answers(sample, output)


class Anywhere:
    """A task scored by the share of its answers that the output contains anywhere, in any case."""

    def score(self, sample: Sample, output: str) -> float:
        return match_all(sample.answers, output)


def match_all(answers: tuple[str, ...], output: str) -> float:
    """Return the share of the answers that the output contains anywhere, in any case: RULER's `string_match_all`."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def match_any(answers: tuple[str, ...], output: str) -> float:
    """Return 1 if the output contains one of the answers anywhere, in any case: RULER's `string_match_part`."""
    return float(any(answer.lower() in output.lower() for answer in answers))


@cache
def _prompts() -> dict[str, dict[str, str]]:
    return tomllib.loads(read_own("prompts.toml"))


def prompts(task: str) -> list[str]:
    """Return the published texts of a task's prompts, in the order of assets/prompts.toml."""
    return list(_prompts()[task].values())


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Return a word list, one word a line."""
    return tuple(line.strip() for line in read_own(name).splitlines() if line.strip())


def word_key(rng: random.Random) -> str:
    """Return an adjective and a noun with a hyphen between, such as `torpid-kid`."""
    return f"{rng.choice(word_list('adjectives.txt'))}-{rng.choice(word_list('nouns.txt'))}"


def number(rng: random.Random, digits: int = 7) -> str:
    """Return a random number of `digits` digits that does not begin with 0."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def uuid(rng: random.Random) -> str:
    """Return a version 4 UUID."""
    h = f"{rng.getrandbits(128):032x}"
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) % 4]}{h[17:20]}-{h[20:]}"


def distinct(rng: random.Random, make: Callable[[random.Random], str], n: int) -> list[str]:
    """`n` different strings from `make`, in the order drawn."""
    seen: dict[str, None] = {}
    while len(seen) < n:
        seen[make(rng)] = None
    return list(seen)


def count(tokenizer: Any, text: str) -> int:
    """Return how many tokens a prompt has for the model, special tokens included."""
    return len(tokenizer(text, verbose=False)["input_ids"])


def fit(tokenizer: Any, length: int, build: Callable[[int, str], Sample], *, most: int | None = None) -> Sample:
    """Return the sample of the most units whose prompt has `length` tokens, or the fewest less that the tokenizer allows.

    build(n, spare) makes it from n units and from `spare`, a few words to put where they disturb least.
    most: the number of units; None if unlimited.

    Raises ValueError if `build(0, "")` is longer than `length`, or all units together are shorter.
    """
    sizes: dict[tuple[int, str], int] = {}

    def size(n: int, spare: str = "") -> int:
        if (n, spare) not in sizes:
            sizes[n, spare] = count(tokenizer, build(n, spare).prompt)
        return sizes[n, spare]

    def short(n: int, spare: str) -> int:
        return length - size(n, spare)

    if size(0) > length:
        raise ValueError(f"length {length} is too short for this task: without a haystack it takes {size(0)} tokens")
    few = min(most or 16, 16)
    unit = max(1, (size(few) - size(0)) // few)
    low, high = 0, (length - size(0)) // unit + 1
    while (most is None or high < most) and size(high) <= length:
        low, high = high, high + high // 8 + 1
    if most is not None and high >= most:
        high = most + 1
        if size(most) < length:
            raise ValueError(f"length {length} is too long for this task: all there is of it takes {size(most)} tokens")
    while high - low > 1:
        share = (length - size(low)) / max(1, size(min(high, most or high)) - size(low))
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        if size(middle) <= length:
            low = middle
            if middle + 1 < high and size(middle + 1) > length:
                high = middle + 1
        else:
            high = middle
            if middle - 1 > low and size(middle - 1) <= length:
                low = middle - 1
    for n in range(low, max(-1, low - 4), -1):
        spare = _spare(tokenizer, short(n, ""), partial(short, n))
        if spare is not None:
            return build(n, spare)
    words = bisect.bisect_right(range(short(low, "") + 1), length, key=lambda n: size(low, _filler(n))) - 1
    for fewer in range(max(0, words), max(-1, words - 4), -1):
        size(low, _filler(fewer))
    best = max((one for one, tokens in sizes.items() if tokens <= length), key=lambda one: (sizes[one], one[0]))
    if short(*best) <= max(ROOM, length // 100):
        return build(*best)
    raise ValueError(f"length {length} cannot be met under this tokenizer: the nearest prompt has {size(*best)} tokens")


def _spare(tokenizer: Any, tokens: int, short: Callable[[str], int]) -> str | None:
    """Return words that take `tokens` tokens in their place, so that short(words), the number of missing tokens, is 0. None if
    no words do."""
    wanted = tokens
    for _ in range(6):
        words = _words(tokenizer, wanted)
        if words is None:
            return None
        missing = short(words)
        if missing == 0:
            return words
        wanted += missing
    return None


def _filler(n: int) -> str:
    """Return the filler's first `n` words, from its start again when it runs out."""
    return " ".join(itertools.islice(itertools.cycle(GRASS.split()), n))


def _words(tokenizer: Any, tokens: int) -> str | None:
    """Return words of `tokens` tokens after a space: the filler's first words, then a short one."""
    if tokens <= 0:
        return "" if tokens == 0 else None

    def alone(words: str) -> int:
        return len(tokenizer(" " + words, add_special_tokens=False)["input_ids"]) if words else 0

    most = bisect.bisect_right(range(tokens + 1), tokens, key=lambda n: alone(_filler(n))) - 1
    for n in range(most, max(-1, most - 4), -1):
        for last in ("", "a", "an", "and", "then", "there", "always", "so it", "and then", "a day"):
            words = f"{_filler(n)} {last}".strip()
            if alone(words) == tokens:
                return words
    return None


def sentence_end(words: list[str], at: int, reach: int = 40) -> int:
    """Return the nearest place from `at` on, at most `reach` words away, where a sentence has just ended; else `at`."""
    if at <= 0 or at >= len(words):
        return max(0, min(at, len(words)))
    for i in range(at, min(at + reach, len(words)) + 1):
        if words[i - 1].rstrip("”’\"')")[-1:] in (".", "!", "?"):
            return i
    return at


@dataclass(frozen=True)
class Haystack:
    """Text as words, taken from its start and again from its start when it runs out; one word is one unit."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str | None) -> Haystack:
        """Return the words of `text`, or of the book that ships."""
        words = tuple((read_asset("book.txt") if text is None else text).split())
        if not words:
            raise ValueError("the haystack text holds no word")
        return cls(words)

    def take(self, n: int) -> list[str]:
        """Return the first `n` words, the text repeated as often as needed."""
        times = -(-n // len(self.words))
        return list((self.words * times)[:n])

    def with_facts(self, n: int, facts: list[str], depths: list[float], spare: str = "") -> str:
        """`n` words and `spare` with each fact put in between two sentences at its depth (0..1), single spaces throughout."""
        words = self.take(n) + spare.split()
        places = [sentence_end(words, round(depth * n)) for depth in depths]
        for i in sorted(range(len(facts)), key=lambda i: (places[i], i), reverse=True):
            words.insert(places[i], facts[i])
        return " ".join(words)


def ahead(spare: str, prompt: str) -> str:
    """Return a published prompt that has no place for words of other kinds, with `spare`, if any, as a line of its own before
    it."""
    return f"{spare}\n\n{prompt}" if spare else prompt


@dataclass(frozen=True)
class FromFile:
    """A task whose whole prompts come from a published file: sample i is the file's, verbatim. The rest is the task's."""

    name: str
    max_new_tokens: int
    stops: tuple[str, ...]
    score: Callable[[Sample, str], float]
    samples: tuple[Sample, ...]

    @staticmethod
    def of(task: Task, samples: Iterable[Sample]) -> FromFile:
        """Return the task over the samples of a file."""
        return FromFile(task.name, task.max_new_tokens, task.stops, task.score, tuple(samples))

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """Return the file's sample number `seed`, with its own depth. Raises ValueError if the file lacks it or it is longer
        than `length`."""
        if not 0 <= seed < len(self.samples):
            raise ValueError(f"the file holds {len(self.samples)} samples, from 0 on; there is no sample {seed}")
        found = self.samples[seed]
        if (tokens := count(tokenizer, found.prompt)) > length:
            raise ValueError(f"length {length} is too short for the file's sample {seed}: it has {tokens} tokens")
        return found


def fingerprint_of(text: str | None, data: Path | None) -> str:
    """Return a short hash of a haystack and of the files that samples come from; "" for what ships. Raises OSError."""
    if text is None and data is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(b"" if text is None else text.encode())
    if data is not None:
        for file in sorted(p for p in data.rglob("*") if p.is_file()) if data.is_dir() else [data]:
            digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def depth_of(context: str, fact: str) -> float:
    """Return the depth of `fact` in `context`: 0 at the beginning, 1 at the end."""
    return context.index(fact) / max(1, len(context) - len(fact))
