"""kvthaw generate with several methods or budgets: their answers to the same questions, from one prefill."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvthaw.cli import options
from kvthaw.cli.progress import Reading, say
from kvthaw.cli.words import attended, details
from kvthaw.errors import ConfigError
from kvthaw.formatting import seconds
from kvthaw.method_names import AUTO

if TYPE_CHECKING:
    from kvthaw.cli.groups import CacheOptions
    from kvthaw.config import CacheConfig
    from kvthaw.engine.hf import Cache, PreTrainedModel
    from kvthaw.engine.sampling import Sampling
    from kvthaw.evaluate.variant import Variant


def is_wanted(given: CacheOptions) -> bool:
    """Return whether an option names several methods or several budgets."""
    return len(options.names_of([given.method])) > 1 or "," in (given.budget or "")


def variants(given: CacheOptions) -> list[Variant]:
    """Return each method under each budget. Raises ConfigError for "auto", which chooses by the length."""
    if AUTO in (name.partition(":")[0] for name in options.names_of([given.method])):
        raise ConfigError(f"--method is {given.method!r}; auto chooses one method, so it has no place among several")
    limits = None if given.budget is None else [given.budget], None if given.retrieved is None else [str(given.retrieved)]
    return options.variants_of([given.method], *limits, [given.dense_layers])


def answer_all(
    model: PreTrainedModel,
    tokenizer: Any,
    parts: Sequence[tuple[list[int], list[int]]],
    questions: Sequence[str],
    ways: Sequence[Variant],
    config: CacheConfig,
    sampling: Sampling,
    *,
    goes_on: bool,
    chunk: int | None,
    live: bool,
    as_json: bool,
) -> None:
    """Prefill the prompt once under full attention, and answer each question under each method from a fork of it.

    parts: for each prompt, the tokens before its question, and the tokens of its question.
    config: settings of all caches, without the limits of `ways`.
    goes_on: the answer's text continues the prompt's.
    live: print an answer as it comes.
    as_json: print an object for each answer instead.
    """
    from kvthaw.answering import Answer, Prompts, shared_tokens
    from kvthaw.evaluate.variant import fork, whole

    prompts, shared, base = [before + after for before, after in parts], shared_tokens(parts), whole(model, ways)
    source = Prompts(model, base, base.settings.method, prompts, shared, chunk=chunk)
    with ExitStack() as shown:
        show = Reading(shown)
        logits = source.read(show)
        show.end()
        for number, (own, after, _) in enumerate(source.each(logits, show)):
            show.end()
            ids = prompts[number]
            if not as_json and questions[number]:
                print(f"> {questions[number]}")
            for way in ways:
                cache = fork(own, way, config=config)
                answer = Answer(model, tokenizer, cache, after, sampling=sampling, prompt=ids, after=ids if goes_on else ())
                if as_json:
                    text = "".join(answer)
                    print(json.dumps(_record(questions[number], way, text, len(ids), answer, cache)), flush=True)
                    continue
                print(f"{way.label}: ", end="")
                _print(answer, live=live)
                each = "" if not answer.tpot_s else f" {seconds(answer.tpot_s)} per token;"
                say(f"{attended(cache)}{each} {details(cache)[0]}.")


def _print(answer: Iterable[str], *, live: bool) -> None:
    for piece in answer if live else ["".join(answer)]:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)


def _record(question: str, way: Variant, text: str, prompt: int, answer: Any, cache: Cache) -> dict[str, Any]:
    asked = {"question": question} if question else {}
    took = {"prompt_tokens": prompt, "new_tokens": len(answer.tokens), "finish": answer.finish, "tpot_s": answer.tpot_s}
    return {**asked, "variant": way.label, "text": text, **took, **cache.stats().to_dict()}
