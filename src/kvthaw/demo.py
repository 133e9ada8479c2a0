"""The main job, end to end: facts planted in a whole book, asked for under a budget and with full attention beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError
from kvthaw.evaluate.answers import Answers
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.probe import Probe
from kvthaw.evaluate.tasks import niah, passkey
from kvthaw.evaluate.tasks.base import Haystack, count, depth_of, distinct, holds, number, read_asset, uuid, word_key
from kvthaw.evaluate.variant import Variant, whole
from kvthaw.methods import resolve

BOOK = "Alice's Adventures in Wonderland"
PROBED = 4  # one step in so many is compared with exact attention
DEPTHS = (0.08, 0.29, 0.47, 0.66, 0.88)


Show = Callable[[str, str], None]
"""Is told what happens and what to show of it: the "book" is read, an "index" made and "ready"; we "ask" a question, "text" of its
answer comes, which is "right" or "wrong"."""


@dataclass(frozen=True, slots=True)
class Question:
    """A fact in the book and what asks for it. depth: where it stands, 0..1."""

    fact: str
    text: str
    answer: str
    limit: int
    depth: float


@dataclass(slots=True)
class Side:
    """What one method answered, and what that took. Counts as in `kvthaw.Stats`; ttft_s and tt2t_s hold the shared prefill."""

    method: str
    budget: int | None = None
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    attended_mean: float | None = None
    attended_max: int | None = None
    kv_device_bytes: int = 0
    kv_host_bytes: int = 0
    hit_rate: float | None = None
    attention_mass: float | None = None
    recall_at_k: float | None = None
    sparse_steps: int = 0
    index_s: float = 0.0
    ttft_s: float | None = None
    tt2t_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The demo's result. prefill_s: of the one prefill that served both sides."""

    prompt_tokens: int
    prefill_s: float
    questions: list[Question]
    thawed: Side
    full: Side

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, for JSON."""
        return asdict(self)


def read_book(tokenizer: Any, *, length: int | None = None, seed: int = 0) -> tuple[list[int], list[Question]]:
    """Return the tokens of the book that ships with five facts planted in it, cut to at most `length` if given, and the questions.

    Raises ConfigError where the facts alone are longer.
    """
    rng = random.Random(seed)
    planted = facts(rng)
    book = Haystack.of(read_asset("book.txt"))
    words = len(book.words)
    while True:
        body = book.with_facts(words, [q.fact for q in planted], list(DEPTHS))
        context = INTRO + body
        tokens = count(tokenizer, context)
        if length is None or tokens <= length:
            break
        if words == 0:
            raise ConfigError(f"length is {length}; the facts alone take {tokens} tokens")
        words = max(0, min(words - 1, int(words * length / tokens * 0.999)))
    questions = [Question(q.fact, q.text, q.answer, q.limit, depth_of(context, q.fact)) for q in planted]
    return list(tokenizer(context)["input_ids"]), questions


INTRO = niah.INTRO.format(kind="numbers")


def facts(rng: random.Random) -> list[Question]:
    """Return the facts in the order in which they are planted, one for each of DEPTHS."""
    key = number(rng, 5)
    found = [Question(passkey.FACT.format(key=key), passkey.QUESTION, key, 8, 0.0)]
    names = distinct(rng, word_key, len(DEPTHS) - 1)
    kinds: list[niah.Kind] = ["numbers", "words", "numbers", "uuids"]
    for name, kind in zip(names, kinds, strict=True):
        value = {"numbers": number, "words": word_key, "uuids": uuid}[kind](rng)
        fact = niah.NEEDLE.format(kind=kind, key=name, value=value)
        text = niah.QUESTION_ONE.format(one=kind[:-1], query=name)
        found.append(Question(fact, text, value, 48 if kind == "uuids" else 16, 0.0))
    rng.shuffle(found)
    return found


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    method: str = "icecache-digest",
    budget: int | float = 256,
    length: int | None = None,
    seed: int = 0,
    show: Show = lambda what, text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Read the book once, then answer every question under a method (dense_layers=0) and with full attention.

    Each question starts from the book alone. Its tokens go through the sparse path one by one, so that nothing but the prefill
    reads more than the budget. Raises ConfigError for settings that do not work, before the prefill.
    """
    book, questions = read_book(tokenizer, length=length, seed=seed)
    check_prompt(model, len(book) + max(len(_question(tokenizer, q)) + q.limit for q in questions))
    Cache(model, method, budget=budget, dense_layers=0)
    show("book", f"{BOOK}: {len(book):,} tokens with {len(questions)} facts planted in it")
    start = now(model.device)
    base = whole(model, [Variant(method)])
    logits = prefill(model, base, book, progress=progress)
    prefill_s = now(model.device) - start
    session = _Session(model, tokenizer, base, logits, prefill_s, show)
    thawed, full = Side(method), Side("full")
    session.answer_all(thawed, questions, budget=budget)
    session.answer_all(full, questions)
    return Outcome(len(book), prefill_s, questions, thawed, full)


@dataclass(frozen=True, slots=True)
class _Session:
    model: PreTrainedModel
    tokenizer: Any
    base: Cache
    logits: Tensor
    prefill_s: float
    show: Show

    def answer_all(self, side: Side, questions: list[Question], **settings: Any) -> None:
        """Fork the book once for a side, and cut the cache back to the book after each question. Full attention is the base."""
        device, book, dense = self.model.device, self.base.get_seq_length(), resolve(side.method).dense
        self.show("index", "")
        start = now(device)
        cache = self.base if dense else self.base.fork(side.method, dense_layers=0, **settings)
        cache.wait()
        side.index_s = now(device) - start
        self.show("ready", f"\n{side.method}")
        probe = Probe(cache, every=PROBED, reference=self.base)
        first, second, each = [], [], []
        for question in questions:
            asked = question.text.strip().split("?")[0] + "?"
            self.show("ask", f"  {100 * question.depth:3.0f} % {asked}")
            begin, watched = now(device), probe.seconds
            times = []
            answers = Answers(self.model, self.tokenizer, cache)
            for (piece,) in answers.stream(self.logits[None], [_question(self.tokenizer, question)], question.limit):
                if piece is not None:
                    times.append(now(device) - begin - (probe.seconds - watched))
                    self.show("text", piece)
            (text,) = answers.texts
            side.answers.append(text.strip())
            right = holds(text, question.answer)
            side.right.append(right)
            self.show("right" if right else "wrong", "  right" if right else f"  wrong, it is {question.answer}")
            if times:
                first.append(times[0])
            if len(times) > 1:
                second.append(times[1])
                each.append((times[-1] - times[0]) / (len(times) - 1))
            cache.keep(book)
        stats, quality = cache.stats(), probe.quality()
        side.budget, side.attended_mean, side.attended_max = stats.budget, stats.attended_mean, stats.attended_max
        side.kv_device_bytes, side.kv_host_bytes = stats.kv_device_bytes + stats.kv_dense_bytes, stats.kv_host_bytes
        side.hit_rate, side.sparse_steps = stats.hit_rate, stats.sparse_steps
        side.attention_mass, side.recall_at_k = quality.attention_mass, quality.recall_at_k
        if dense:
            side.attended_mean, side.attended_max, side.attention_mass = float(book), book, 1.0
        before = self.prefill_s + side.index_s
        side.ttft_s, side.tt2t_s, side.tpot_s = _plus(mean(first), before), _plus(mean(second), before), mean(each)


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more


def _question(tokenizer: Any, question: Question) -> list[int]:
    """Return a question's own tokens; it begins with a newline, which no token spans."""
    return list(tokenizer(question.text, add_special_tokens=False)["input_ids"])
