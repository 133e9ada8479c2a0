"""What the demo asks, and about which text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvthaw.answering import shared_tokens
from kvthaw.engine.chat_template import Chat, following, split_prompt
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_asset
from lab.evaluate.assets import read_own
from lab.evaluate.tasks import niah, passkey
from lab.evaluate.tasks.base import Haystack, count, depth_of, distinct, holds, number, uuid, word_key

BOOK = "Alice's Adventures in Wonderland"
DEPTHS = (0.08, 0.29, 0.47, 0.66, 0.88)
ASKED = (
    ("Who built the organ?", "Jonas Eide", "The organ was built"),
    ("When is the museum closed?", "Mondays", "The museum opens"),
    ("What is the church of Northby built of?", "driftwood", "The church of Northby is built"),
    ("What is the most important product of the island today?", "seaweed", "Today the most important product"),
    ("How long does the crossing take?", "two hours", "The crossing takes"),
    ("Who is the owner of the Anchor Hotel?", "Peter Aldous", "The owner of the hotel"),
)
"""What is asked about the guide, words of the right answer, and how the sentence begins that gives it."""
INTRO = niah.INTRO.format(kind="numbers")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the text, and the words that a right answer contains.

    limit: most tokens of an answer.
    depth: place of the fact in the text, 0..1.
    end: the question's tokens, which follow the text.
    """

    text: str
    answer: str
    limit: int
    depth: float
    end: tuple[int, ...] = ()

    def right(self, said: str) -> bool:
        """Return whether an answer holds the words, in capitals or not."""
        return holds(said.casefold(), self.answer.casefold())


@dataclass(frozen=True, slots=True)
class Text:
    """A text's tokens, and questions about it.

    until: strings that end an answer.
    """

    title: str
    tokens: list[int]
    questions: list[Question]
    until: tuple[str, ...] = ()


def planted(tokenizer: Any, *, length: int | None = None, seed: int = 0) -> Text:
    """Return the book that ships with five facts planted in it, cut to at most `length` tokens if given.

    Raises ConfigError where the facts alone are longer.
    """
    made = facts(random.Random(seed))
    book = Haystack.of(read_asset("book.txt"))
    words = len(book.words)
    while True:
        context = INTRO + book.with_facts(words, [fact for fact, _ in made], list(DEPTHS))
        tokens = count(tokenizer, context)
        if length is None or tokens <= length:
            break
        if words == 0:
            raise ConfigError(f"length is {length}; the facts alone take {tokens} tokens")
        words = max(0, min(words - 1, int(words * length / tokens * 0.999)))
    questions = [
        Question(
            one.text.strip().split("?")[0] + "?",
            one.answer,
            one.limit,
            depth_of(context, fact),
            tuple(tokenizer(one.text, add_special_tokens=False)["input_ids"]),  # it begins with a newline, which no token spans
        )
        for fact, one in made
    ]
    ids = list(tokenizer(context)["input_ids"])
    return Text(f"{BOOK}: {len(ids):,} tokens with {len(questions)} facts planted in it", ids, questions, ("\n",))


def guide(tokenizer: Any) -> Text:
    """Return a guide to an island and what visitors ask, through the tokenizer's chat template."""
    text = read_own("skarholm.txt").strip()
    chat, parts = Chat(), list[tuple[list[int], list[int]]]()
    for question, _, _ in ASKED:
        parts.append(split_prompt(tokenizer, text, following(text, question), chat))
    shared = shared_tokens(parts)
    questions = [
        Question(question, answer, 24, text.index(where) / len(text), tuple((before + end)[len(shared) :]))
        for (question, answer, where), (before, end) in zip(ASKED, parts, strict=True)
    ]
    return Text(f"A guide to the island of Skarholm: {len(shared):,} tokens", shared, questions, ("\n", ". "))


def facts(rng: random.Random) -> list[tuple[str, Question]]:
    """Return the facts and what asks for them, in the order in which they are planted, one for each of DEPTHS."""
    key = number(rng, 5)
    found = [(passkey.FACT.format(key=key), Question(passkey.QUESTION, key, 8, 0.0))]
    names = distinct(rng, word_key, len(DEPTHS) - 1)
    kinds: list[niah.Kind] = ["numbers", "words", "numbers", "uuids"]
    for name, kind in zip(names, kinds, strict=True):
        value = {"numbers": number, "words": word_key, "uuids": uuid}[kind](rng)
        fact = niah.NEEDLE.format(kind=kind, key=name, value=value)
        text = niah.QUESTION_ONE.format(one=kind[:-1], query=name)
        found.append((fact, Question(text, value, 48 if kind == "uuids" else 16, 0.0)))
    rng.shuffle(found)
    return found
