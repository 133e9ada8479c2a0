"""Answer a question about a document and record what each of some methods recalls for the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvthaw.cache.layer_base import LayerKV
from kvthaw.engine.decode import decode
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.text import Chat, following, split_prompt, stop_tokens
from kvthaw.evaluate.variant import Variant, fork, whole
from kvthaw.inspect.recorder import ExactTopK, Recorder, Recording
from kvthaw.methods import resolve


@dataclass(eq=False)
class Run:
    """What one method recalled. said: the token that it would have chosen at each step. places: bytes of KV by place, and bytes
    fetched so far, after each step."""

    variant: Variant
    recording: Recording = field(default_factory=Recording)
    said: list[int] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=lambda: {"device": [], "host": [], "fetched": []})


@dataclass(frozen=True, slots=True)
class Inspection:
    """A document's tokens, a question's, and those of the answer that the first run gave."""

    document: list[int]
    question: list[int]
    answer: list[int]
    runs: list[Run]


def inspect(
    model: PreTrainedModel,
    tokenizer: Any,
    document: str,
    question: str,
    variants: Sequence[Variant],
    *,
    limit: int = 64,
    exact: bool = True,
    chat: Chat | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Prefill a document once, then send the question and the answer through each variant, token by token.

    The first variant answers greedily; the others are given its tokens. exact: rank all tokens beside every step. chat: as one
    message. Raises ConfigError for a question without tokens, a method that retrieves nothing and a tokenizer without a template.
    """
    at_least(1, max_new_tokens=limit)
    for variant in variants:
        check_retrieves(variant)
    if chat is not None:
        chat.check(tokenizer)
    before, asked = split_prompt(tokenizer, document, following(document, question), chat)
    if not before or not asked:
        raise ConfigError(f"the document has {len(before)} tokens and the question {len(asked)}; each needs at least 1")
    check_prompt(model, len(before) + len(asked) + limit)
    base = whole(model, variants)
    logits = prefill(model, base, before, progress=progress)
    answer: list[int] = []
    runs = []
    for variant in variants:
        run = Run(variant)
        stops = stop_tokens(model, tokenizer)
        _record(model, fork(base, variant), base.kv.layers, logits, asked, run, answer, exact, stops, limit)
        runs.append(run)
    return Inspection(before, asked, answer, runs)


def replay(
    model: PreTrainedModel, variant: Variant, prompt: Sequence[int], answer: Sequence[int], *, exact: bool = False
) -> Run:
    """Record what a variant recalls for an answer that was given after a prompt. exact: rank all tokens beside every step, but for
    methods that evict. Raises ConfigError for a method that retrieves nothing."""
    check_retrieves(variant)
    cache, run = Cache(model, variant.method, budget=variant.budget, retrieved=variant.retrieved), Run(variant)
    logits = prefill(model, cache, prompt)
    cache.wait()
    _record(model, cache, (), logits, (), run, list(answer), exact, frozenset(), len(answer))
    return run


def check_retrieves(variant: Variant) -> None:
    """Raise ConfigError for a method that retrieves nothing that could be shown."""
    if resolve(variant.method).index is None:
        raise ConfigError(f"method is {variant.method!r}, which retrieves nothing that could be shown")


def _record(
    model: PreTrainedModel,
    cache: Cache,
    reference: Sequence[LayerKV],
    logits: Tensor,
    asked: Sequence[int],
    run: Run,
    answer: list[int],
    exact: bool,
    stops: frozenset[int],
    limit: int,
) -> None:
    """Send the question and the answer through a cache; an answer that is empty is filled."""
    given, pending = list(answer), deque(asked)
    recorder = Recorder(cache.kv)
    ranked = ExactTopK(cache.kv, [0], reference) if exact else None

    def choose(after: Tensor) -> list[int] | None:
        if pending:
            return [pending.popleft()]
        run.recording.take(0, recorder, ranked)
        stats = cache.stats()
        for place, count in (
            ("device", stats.kv_device_bytes + stats.kv_dense_bytes),
            ("host", stats.kv_host_bytes),
            ("fetched", stats.fetched_bytes),
        ):
            run.places[place].append(count)
        token = int(after[0].argmax())
        run.said.append(token)
        if not given:
            answer.append(token)
        step = len(run.said) - 1
        token = given[step] if given else token
        ended = step + 1 == (len(given) or limit) or (not given and token in stops)
        return None if ended else [token]

    for _ in decode(model, cache, logits[None], choose):
        pass
    recorder.detach()
    if ranked is not None:
        ranked.detach()
