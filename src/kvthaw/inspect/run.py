"""Answer a question about a document and record what each of some methods recalls for the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.layer_base import LayerKV
from kvthaw.engine.chat_template import Chat, following, split_prompt
from kvthaw.engine.decode import decode
from kvthaw.engine.generation_config import stop_tokens
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import check_prompt, check_text, positions
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import GREEDY, Sampler, Sampling
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.variant import Variant, check_retrieves, fork, whole
from kvthaw.formatting import counted
from kvthaw.inspect.recorder import ExactTopK, Recorder, Recording


@dataclass(eq=False)
class Run:
    """The recall of one method.

    said: the token that it would choose at each step, by the sampling settings of the answer.
    places: after each step, bytes of KV by memory, and bytes fetched so far.
    """

    variant: Variant
    recording: Recording = field(default_factory=Recording)
    said: list[int] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=lambda: {"device": [], "host": [], "fetched": []})


@dataclass(frozen=True, slots=True)
class Inspection:
    """The tokens of a document, of a question, and of the first run's answer."""

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
    sampling: Sampling = GREEDY,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Prefill a document and a question once, as `kvthaw generate` does, then send the answer through each variant, token by token.

    The first variant answers with these sampling settings; the others decode its tokens. The prefill, which attends to
    everything, chooses the first token.

    exact: rank all tokens at every step.
    chat: send document and question as one message.

    Raises ConfigError for a question without tokens, a method that retrieves nothing and a tokenizer without a template.
    """
    at_least(1, max_new_tokens=limit)
    for variant in variants:
        check_retrieves(variant)
    if chat is not None:
        chat.check(tokenizer)
    check_text(tokenizer, document, positions(model))
    before, asked = split_prompt(tokenizer, document, following(document, question), chat)
    if not before or not asked:
        raise ConfigError(
            f"the document has {counted(len(before), 'token')} and the question {len(asked)}; each needs at least 1"
        )
    check_prompt(model, len(before) + len(asked) + limit)
    base = whole(model, variants)
    logits = prefill(model, base, before + asked, progress=progress)
    answer: list[int] = []
    runs = []
    for variant in variants:
        run = Run(variant)
        stops = stop_tokens(model, tokenizer)
        cache = fork(base, variant)
        for _ in record(model, cache, base.kv.layers, logits, run, answer, exact, stops, limit, sampling, before + asked):
            pass
        runs.append(run)
    return Inspection(before, asked, answer, runs)


def record(
    model: PreTrainedModel,
    cache: Cache,
    reference: Sequence[LayerKV],
    logits: Tensor,
    run: Run,
    answer: list[int],
    exact: bool,
    stops: frozenset[int],
    limit: int,
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = (),
) -> Iterator[None]:
    """Send an answer through a cache that holds the prompt, and record it. Fill an empty answer. Yields between tokens.

    reference: layers that hold the prompt in full.
    exact: rank all tokens at every step.
    """
    given, sampler = list(answer), Sampler(1, logits.shape[-1], logits.device)
    sampler.join(0, sampling, prompt, stops)
    recorder = Recorder(cache.kv)
    ranked = ExactTopK(cache.kv, [0], reference) if exact else None

    def choose(after: Tensor) -> list[int] | None:
        run.recording.take(0, recorder, ranked)
        stats = cache.stats()
        for place, count in (
            ("device", stats.kv_device_bytes + stats.kv_dense_bytes),
            ("host", stats.kv_host_bytes),
            ("fetched", stats.fetched_bytes),
        ):
            run.places[place].append(count)
        token = int(sampler(after, torch.tensor([cache.get_seq_length()], device=after.device)).tokens)
        run.said.append(token)
        if not given:
            answer.append(token)
        step = len(run.said) - 1
        token = given[step] if given else token
        ended = step + 1 == (len(given) or limit) or (not given and token in stops)
        return None if ended else [token]

    try:
        for _ in decode(model, cache, logits[None], choose):
            yield
    finally:
        recorder.detach()
        if ranked is not None:
            ranked.detach()
