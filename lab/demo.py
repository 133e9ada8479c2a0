"""Questions about a text, each answered from a few rows per head and with full attention, from one prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.results import mean
from kvthaw.evaluate.variant import Variant, whole
from kvthaw.inspect.page import texts
from kvthaw.inspect.passages import Passage, passages
from kvthaw.inspect.recorder import Recorder, Recording
from lab.demo_texts import Question, Text
from lab.evaluate.answers import Answers
from lab.evaluate.probe import Probe

PROBED = 4  # every fourth step is compared with exact attention
SHOWN = 1  # passages of an answer

Show = Callable[[str, str], None]
"""Called with an event and what to show of it.

"text": the text is read.
"index": the index is being built.
"ready": the prefill is done.
"ask": a question.
"side": a method starts to answer.
"said": a piece of the answer.
"right" or "wrong": whether the answer is right.
"recalled": a passage that the method recalled.
"""


@dataclass(slots=True)
class Side:
    """The answers of one method, with their costs counted as in `kvthaw.Stats`.

    The times ttft_s and tt2t_s include the prefill that all methods share.

    recalled: the passages of each answer. Full attention has none.
    """

    method: str
    budget: int | None = None
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    recalled: list[list[Passage]] = field(default_factory=list)
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
    """The demo's result. One prefill, which took prefill_s, served both sides."""

    prompt_tokens: int
    prefill_s: float
    questions: list[Question]
    thawed: Side
    full: Side

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, for JSON."""
        return asdict(self)


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text,
    *,
    method: str = "thaw",
    budget: int | float = 256,
    dense_layers: int | None = None,
    show: Show = lambda what, text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Read a text once, then answer every question with full attention and under a method.

    Each question starts from the text alone and is prefilled, as `kvthaw chat` does it; every step of its answer reads at most
    the budget. With dense_layers=None the method sets the dense layers. Raises ConfigError for invalid settings, before the
    prefill.
    """
    check_prompt(model, len(text.tokens) + max(len(one.end) + one.limit for one in text.questions))
    limits: dict[str, Any] = {"budget": budget} | ({} if dense_layers is None else {"dense_layers": dense_layers})
    Cache(model, method, **limits)
    show("text", text.title)
    start = now(model.device)
    base = whole(model, [Variant(method)])
    prefill(model, base, text.tokens, progress=progress)
    prefill_s = now(model.device) - start
    show("index", "")
    start = now(model.device)
    fork = base.fork(method, **limits)
    fork.wait()
    sides = [_Answering(model, tokenizer, text, Side("full"), base)]
    sides.append(_Answering(model, tokenizer, text, Side(method, index_s=now(model.device) - start), fork, base))
    show("ready", "")
    for question in text.questions:
        show("ask", question.text)
        for side in sides:
            side.answer(question, show)
    full, thawed = (side.close(prefill_s) for side in sides)
    return Outcome(len(text.tokens), prefill_s, text.questions, thawed, full)


class _Answering:
    """Answers one question after another on a cache that holds the text. A sparse cache has a reference that holds it in full."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        text: Text,
        side: Side,
        cache: Cache,
        reference: Cache | None = None,
    ) -> None:
        self._model, self._tokenizer, self._text, self._side = model, tokenizer, text, side
        self._cache, self._sparse = cache, reference is not None
        self._probe = Probe(cache, every=PROBED, reference=reference) if self._sparse else None
        self._recorder = Recorder(cache.kv) if self._sparse else None
        self._pieces = texts(tokenizer, text.tokens) if self._sparse else []
        self._first, self._second, self._each = list[float](), list[float](), list[float]()

    def answer(self, question: Question, show: Show) -> None:
        """Answer a question, and go back to the text."""
        side, probe = self._side, self._probe
        show("side", side.method)
        begin, watched, device = now(self._model.device), probe.seconds if probe else 0.0, self._model.device
        times, said, recording = list[float](), list[str](), Recording()
        answers = Answers(self._model, self._tokenizer, self._cache, until=self._text.until)
        logits = prefill(self._model, self._cache, question.end)
        for (piece,) in answers.stream(logits[None], [()], question.limit):
            if piece is not None:
                times.append(now(device) - begin - ((probe.seconds if probe else 0.0) - watched))
                show("said", piece)
                said.append(piece)
                if self._recorder is not None:
                    recording.take(0, self._recorder, None)
        (answer,) = answers.texts
        side.answers.append(answer.strip())
        side.right.append(question.right(answer))
        show("right" if side.right[-1] else "wrong", question.answer)
        side.recalled.append(passages(recording, self._pieces, said, SHOWN) if self._sparse else [])
        for one in side.recalled[-1]:
            show("recalled", one.text)
        self._time(times)
        self._cache.keep(len(self._text.tokens))

    def _time(self, times: Sequence[float]) -> None:
        if times:
            self._first.append(times[0])
        if len(times) > 1:
            self._second.append(times[1])
            self._each.append((times[-1] - times[0]) / (len(times) - 1))

    def close(self, prefill_s: float) -> Side:
        """Return what all of that took."""
        side, stats, held = self._side, self._cache.stats(), len(self._text.tokens)
        side.budget, side.attended_mean, side.attended_max = stats.budget, stats.attended_mean, stats.attended_max
        side.kv_device_bytes, side.kv_host_bytes = stats.kv_device_bytes + stats.kv_dense_bytes, stats.kv_host_bytes
        side.hit_rate, side.sparse_steps = stats.hit_rate, stats.sparse_steps
        if self._probe is None:
            side.attended_mean, side.attended_max, side.attention_mass = float(held), held, 1.0
        else:
            quality = self._probe.quality()
            side.attention_mass, side.recall_at_k = quality.attention_mass, quality.recall_at_k
        before = prefill_s + side.index_s
        side.ttft_s, side.tt2t_s = _plus(mean(self._first), before), _plus(mean(self._second), before)
        side.tpot_s = mean(self._each)
        return side


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more
