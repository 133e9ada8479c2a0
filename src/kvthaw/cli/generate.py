"""kvthaw generate: continue a prompt, or answer questions about a document."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import as_its_makers, attended, cut_to, details, prompt_text, tell_template, took, warned
from kvthaw.cli.options import CacheOptions, ChatOptions, ModelOptions, SamplingOptions, file_option, flat, option
from kvthaw.cli.progress import Reading, say, waiting
from kvthaw.errors import ConfigError
from kvthaw.formatting import seconds
from kvthaw.method_names import AUTO
from kvthaw.regions import BUDGET

if TYPE_CHECKING:
    from kvthaw.evaluate.variant import Variant

EXAMPLES = (
    'Examples:\n\n  kvthaw generate "The sky is blue. The sun is" --max-new-tokens 8\n\n'
    '  kvthaw generate --model Qwen/Qwen3-8B --file notes.txt --question "Who leads?" --question "What was decided?"\n\n'
    '  kvthaw generate --model Qwen/Qwen3-8B --file notes.txt --question "Who leads?" --kv notes.kv '
    "  (again, it reads the question alone)\n\n"
    '  kvthaw generate --model Qwen/Qwen3-8B --file notes.txt --question "Who leads?" --method full,thaw --budget 256,1024'
    "  (side by side)\n\n"
    '  kvthaw generate "Tell me a joke." --model Qwen/Qwen3-8B --chat --system "Be brief." --temperature 0.7 --top-p 0.9\n\n'
    "  cat book.txt | kvthaw generate --model meta-llama/Llama-3.1-8B --budget 0.05 --json"
)


@dataclass(frozen=True, slots=True)
class _CacheOptions(CacheOptions):
    method: str = option(
        "A name of [bold]kvthaw methods[/], with options as in icecache-digest:reuse=2; or [bold]auto[/]. Several, by commas, "
        "answer side by side.",
        "auto",
        callback=options.named_method,
    )
    budget: str | None = option(
        f"Most tokens attended per KV head and step, or a fraction of the length; several by commas. Default {BUDGET:,}.",
        metavar="TOKENS",
    )

    @property
    def several(self) -> bool:
        """Whether several methods or several budgets are named."""
        return len(options.names_of([self.method])) > 1 or "," in (self.budget or "")

    def variants(self) -> list[Variant]:
        """Return each method under each budget. Raises ConfigError for "auto", which chooses by the length."""
        if AUTO in (name.partition(":")[0] for name in options.names_of([self.method])):
            raise ConfigError(f"--method is {self.method!r}; auto chooses one method, so it has no place among several")
        named = {"budget": self.budget, "retrieved": self.retrieved}
        limits: dict[str, Any] = {name: None if limit is None else [str(limit)] for name, limit in named.items()}
        return options.VariantOptions(method=[self.method], dense_layers=[self.dense_layers], **limits).variants()


@flat
def generate(
    loading: ModelOptions,
    settings: _CacheOptions,
    template: ChatOptions,
    drawing: SamplingOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, --file or stdin.")] = None,
    file: Path | None = file_option("Read the prompt from this file."),
    question: list[str] | None = option(
        "Ask this after the prompt, through the chat template of a model that has one; may be repeated: the prompt is prefilled "
        "once, and each question is answered alone.",
        metavar="TEXT",
    ),
    cut: options.Cut = False,
    max_new_tokens: options.MaxNewTokens = 128,
    prefill_chunk: options.PrefillChunk = None,
    kv: Path | None = option(
        "Keep the KV of the prompt, without its questions, in this folder: a later prompt that begins alike prefills only its "
        "rest.",
        parser=options.folder,
        metavar="DIRECTORY",
    ),
    stream: bool = option("Print the text as it comes.", True),
    as_json: bool = option("Print one JSON object an answer and nothing else on stdout.", False, "--json"),
    verbose: options.Verbose = False,
) -> None:
    """Continue a prompt under a method and a budget, or answer questions about it.

    The text goes to stdout, progress and cache statistics to stderr.
    """
    method, several = settings.method, settings.several
    alone = replace(settings, budget=None, retrieved=None) if several else settings
    config = alone.config(drawing.seed)
    if several and kv is not None:
        raise ConfigError("--kv is for one method and one budget; several are given")
    text, asked = prompt_text(prompt, file), template.asked()
    if prompt is not None and len(prompt) < 256 and Path(prompt).is_file():
        warned(f"{prompt} is a file; its name is the prompt. --file {prompt} reads it.")
    from kvthaw.methods.auto import check_settings

    ways: list[Variant | None] = [*settings.variants()] if several else [None]
    if not several:
        check_settings(method, config)  # what is wrong costs no loading
    sampling = drawing.sampling(max_new_tokens)
    from kvthaw.answering import Answer, Prompts, shared_tokens
    from kvthaw.engine.chat_template import Chat, dates_of_kept, following, has_template, split_prompt
    from kvthaw.engine.hf import Cache
    from kvthaw.engine.hf.kept import fill, keep, saved_tokens
    from kvthaw.engine.hf.model import check_prompt, positions
    from kvthaw.evaluate.machine import now, versions
    from kvthaw.evaluate.variant import fork, whole

    caches = [(method, config) if way is None else way.cache for way in ways]
    llm, tokenizer = loading.load(caches, asked, None if cut else text, template.template())
    undecided = template.chat is None and asked is None
    if undecided:
        asked = Chat() if question and has_template(tokenizer) else None
    questions, dates = question or [""], dict[str, str]()
    if cut and (limit := positions(llm)) is not None:
        rest = max(sum(map(len, split_prompt(tokenizer, ".", following(".", one), asked))) for one in questions)
        text = cut_to(tokenizer, text, limit - rest - max_new_tokens)
    if asked is not None:
        known = [] if kv is None else saved_tokens(llm, kv, lambda _: None)  # fill() warns
        dates = dates_of_kept(tokenizer, asked, known, text)
    parts = [split_prompt(tokenizer, text, following(text, one), asked, dates=dates) for one in questions]
    prompts = [before + after for before, after in parts]
    longest = max(map(len, prompts))
    check_prompt(llm, longest)
    live = stream and not as_json
    if several:
        cache = whole(llm, [way for way in ways if way is not None])
    else:
        cache = Cache(llm, method, sized_for=(1, longest, max_new_tokens), config=config)
    if undecided and not as_json:  # nothing is refused any more
        tell_template(loading.model, tokenizer, taken=asked is not None)
    sampling = as_its_makers(sampling, drawing.given, llm)
    start, once = now(llm.device), kv is None and len(prompts) == 1
    shared = prompts[0] if once else shared_tokens(parts)
    taken = 0 if kv is None else fill(cache, kv, shared, warned)
    source = Prompts(llm, cache, cache.settings.method if several else method, prompts, shared, taken, prefill_chunk)
    with ExitStack() as shown:
        show = Reading(shown)
        logits = source.read(show)
        show.end()
        if kv is not None and not taken:
            with waiting("saving"):
                keep(cache, kv, shared, warned)
        for number, (own, after, kept) in enumerate(source.each(logits, show)):
            show.end()
            if (several or len(prompts) > 1) and questions[number] and not as_json:
                print(f"> {questions[number]}")
            ids = prompts[number]
            for way in ways:
                held = own if way is None else fork(own, way, config=config)
                answer = Answer(llm, tokenizer, held, after, sampling=sampling, prompt=ids, after=ids if asked is None else ())
                first = now(llm.device) - start
                if way is not None and not as_json:
                    print(f"{way.label}: ", end="")
                for piece in answer:
                    if live:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
                new = len(answer.tokens)
                timing: dict[str, Any] = {"tpot_s": answer.tpot_s}
                if way is None:  # several share a prefill
                    second = answer.times[1] - start if new > 1 else None
                    timing = {"ttft_s": first if new else None, "tt2t_s": second} | timing
                if as_json:
                    record = {
                        **({"question": questions[number]} if questions[number] else {}),
                        **({} if way is None else {"variant": way.label}),
                        "model": loading.model,
                        "text": answer.text,
                        "prompt_tokens": len(ids),
                        "kept_tokens": kept,
                        "new_tokens": new,
                        "finish": answer.finish,
                        "temperature": sampling.temperature,
                        "seed": drawing.seed,
                        **timing,
                        **held.stats().to_dict(),
                        "versions": versions(),
                    }
                    print(json.dumps(record), flush=True)
                    continue
                print("" if live else answer.text)
                if way is None:
                    lines = [attended(held), took(len(ids) - kept, kept, timing["ttft_s"], answer.tpot_s, new)]
                    lines += details(held) if verbose else ()
                else:
                    each = "" if not answer.tpot_s else f" {seconds(answer.tpot_s)} per token;"
                    lines = [f"{attended(held)}{each} {details(held)[0]}."]
                for line in lines:
                    say(line)
            start = now(llm.device)
