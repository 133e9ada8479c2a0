"""RULER's questions over documents (Hsieh et al., 2024): documents with the answer, hidden among others.

qa_1 takes files in SQuAD's layout (Rajpurkar et al., 2016), qa_2 in HotpotQA's (Yang et al., 2018). Without files, qa_1
uses shipped fairy tales, and qa_2 an invented country made from the seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_json
from lab.evaluate.assets import ASSETS

from .base import Sample, Task, depth_of, distinct, fit, match_any, prompts, word_list

INTRO, QUESTION = prompts("documents")


@dataclass(frozen=True)
class Question:
    """A question, its answers (any of them is right), the documents that it needs, and the first of the other documents."""

    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Documents, and questions about them by the documents' indices."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Documents:
    """Questions of a library. A question's documents are hidden among the most others that fit, first the same article's.

    If the others run out they repeat. Documents with the answer occur once.
    """

    name: str
    read: Callable[[Path | None], Library]
    path: Path | None = None
    max_new_tokens: int = 32
    stops: tuple[str, ...] = ()

    def reading(self, path: Path) -> Task:
        """See Reads; a JSON file, gzip too, in the layout that the task is for."""
        self.read(path)
        return Documents(self.name, self.read, path)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """Return a sample; see Task.sample. A unit is a word of the other documents; the last document is cut.

        `depth` is the place of the first document with the answer. `text` is ignored. Questions repeat after all have been
        used.
        """
        library, rng = self.read(self.path), random.Random(seed)
        turn, place = divmod(seed, len(library.questions))
        asked = random.Random(turn).sample(library.questions, len(library.questions))[place]
        near = rng.sample(asked.near, len(asked.near))
        far = sorted({*range(len(library.documents))} - {*asked.gold, *asked.near})
        others = [library.documents[i].split(" ") for i in (*near, *rng.sample(far, len(far)))]
        places = [rng.random() for _ in asked.gold]
        if depth is not None:
            places = [depth, *(depth + (1 - depth) * at for at in places[1:])]
        gold = [library.documents[i] for i in asked.gold]
        question = QUESTION.format(query=asked.query)

        def build(n: int, spare: str) -> Sample:
            shown = _first_words(others, n, spare)
            for at, document in sorted(zip(places, gold, strict=True), reverse=True):
                shown.insert(_after(shown, at), document)
            context = INTRO + "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(shown, 1))
            return Sample(context, question, asked.answers, depth_of(context, gold[0]))

        return fit(tokenizer, length, build, most=None if others else 0)

    def score(self, sample: Sample, output: str) -> float:
        """Return 1 if the output contains one of the answers, in any case (`string_match_part`)."""
        return match_any(sample.answers, output)


@cache
def read_squad(path: Path | None) -> Library:
    """SQuAD's layout: data, paragraphs, context and qas. None: fairy tales. Raises ConfigError for any other."""
    try:
        articles = read_json(ASSETS / "fairytales.json" if path is None else path)["data"]
        contexts = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in articles]
        documents = sorted(set(itertools.chain.from_iterable(contexts)))
        index = {document: i for i, document in enumerate(documents)}
        questions = tuple(
            Question(
                asked["question"],
                tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                (index[paragraph["context"]],),
                tuple(sorted({index[other] for other in mine} - {index[paragraph["context"]]})),
            )
            for article, mine in zip(articles, contexts, strict=True)
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
            if asked["answers"] and not asked.get("is_impossible", False)
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"data is {str(path)!r}; it is not in SQuAD's layout: {error!r}") from error
    return _library(path, documents, questions)


@cache
def read_hotpot(path: Path | None) -> Library:
    """HotpotQA's layout: a list of question, answer and context, pairs of a title and sentences; or lines of its site's sample.

    None: an invented country. Raises ConfigError for any other.
    """
    if path is None:
        return invented(random.Random("country"))
    try:
        loaded = read_json(path)
        each = [loaded] if isinstance(loaded, dict) else loaded  # a file of one line
        records = [(one["question"], one["answer"], _paragraphs(one)) for one in each]
        documents = sorted({document for *_, shown in records for document in shown})
        index = {document: i for i, document in enumerate(documents)}
        questions = tuple(Question(q, (a,), tuple(dict.fromkeys(index[d] for d in shown))) for q, a, shown in records)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"data is {str(path)!r}; it is not in HotpotQA's layout: {error!r}") from error
    return _library(path, documents, questions)


def invented(rng: random.Random, people: int = 200) -> Library:
    """Invent people, the towns where they were born and the rivers of those towns. Every question needs two documents."""
    nouns = [noun.capitalize() for noun in word_list("nouns.txt") if noun.isalpha() and 3 < len(noun) < 9]
    names = distinct(rng, lambda r: f"{r.choice(nouns)} {r.choice(nouns)}", people)
    towns = [f"{noun}ton" for noun in rng.sample(nouns, people)]
    rivers = [noun for noun in rng.sample(nouns, people) if noun + "ton" not in towns]
    trades = ("baker", "clockmaker", "miller", "painter", "sailor", "teacher", "weaver")
    of_people = [
        f"{name}\n{name} was a {rng.choice(trades)}. {name} was born in {town} and left it at the age of {rng.randint(9, 40)}."
        for name, town in zip(names, towns, strict=True)
    ]
    on = [rng.choice(rivers) for _ in towns]
    of_towns = [
        f"{town}\n{town} has {rng.randint(2, 90)},000 people. It lies on the river {river}, with {rng.randint(2, 30)} bridges."
        for town, river in zip(towns, on, strict=True)
    ]
    questions = tuple(
        Question(f"On which river lies the town where {name} was born?", (river,), (i, people + i))
        for i, (name, river) in enumerate(zip(names, on, strict=True))
    )
    return Library((*of_people, *of_towns), questions)


def _first_words(documents: Sequence[Sequence[str]], n: int, spare: str) -> list[str]:
    """Documents, again and again, up to `n` words together; `spare` goes to the end of the last."""
    shown: list[str] = []
    for words in itertools.cycle(documents) if documents else ():
        if n <= 0:
            break
        shown.append(" ".join(words[:n]))
        n -= len(words)
    if spare:
        shown = [*shown[:-1], f"{shown[-1]} {spare}"] if shown else [spare]
    return shown


def _after(documents: Sequence[str], depth: float) -> int:
    """Return the number of documents that end within the first `depth` (0..1) of the text."""
    ends = list(itertools.accumulate(len(document) for document in documents))
    return sum(end <= depth * ends[-1] + 1 for end in ends) if ends else 0


def _paragraphs(record: dict[str, Any]) -> list[str]:
    """Return title and text of a record's documents. In the site's sample, documents with the answer come first."""
    if "para_a" in record:
        pairs = [[record["title_a"], record["para_a"]], [record["title_b"], record["para_b"]], *record["distractors"]]
    else:
        pairs = record["context"]
    return [f"{title}\n{''.join(sentences)}" for title, sentences, *_ in pairs]


def _library(path: Path | None, documents: Sequence[str], questions: tuple[Question, ...]) -> Library:
    if not questions:
        raise ConfigError(f"data is {str(path)!r}; it holds no question with an answer")
    return Library(tuple(documents), questions)
