"""kvthaw eval agreement: how near methods stay to full attention on one's own text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_results, prompt_text, tell_outdated, warned
from kvthaw.cli.options import ChatOptions, ModelOptions, VariantOptions, file_option, flat, listed, option, tokens_of
from kvthaw.cli.progress import bars, shown
from kvthaw.formatting import counted

if TYPE_CHECKING:
    from kvthaw.evaluate.agreement import Prompt

EXAMPLES = (
    "Examples:\n\n  kvthaw eval agreement --model SmolLM2.gguf --file book.txt\n\n"
    "  kvthaw eval agreement --model Qwen/Qwen3-8B --file book.txt --question 'What happens here?' --length 8k,16k\n\n"
    "  kvthaw eval agreement --model Qwen/Qwen3-8B --prompts prompts.jsonl --method pariskv-plus,icecache-digest:unit=token "
    "--budget 256,1024 --limit 20 --tokens 32 --out agreement.jsonl --json"
)
_METHODS, _BUDGETS, _WINDOWS = ["icecache-digest", "thaw"], ["64", "256", "1024"], 4


@dataclass(frozen=True, slots=True)
class _VariantOptions(VariantOptions):
    method: options.Methods = field(default_factory=_METHODS.copy)
    budget: Annotated[list[str] | None, options.budgets("64,256,1024")] = None


@flat
def agreement(
    loading: ModelOptions,
    methods: _VariantOptions,
    template: ChatOptions,
    file: Path | None = file_option("Windows of this text, spread evenly over it; the text itself follows each of them."),
    prompts: Path | None = file_option('A JSON-lines file whose lines hold a "prompt"; full attention answers each greedily.'),
    question: str | None = option("Ask this behind every window of --file; full attention answers greedily."),
    length: list[str] | None = option(
        f"Tokens of a window; {options.SEVERAL}. Default 2048, or half of a shorter text. With --prompts one number, the most of "
        "a prompt: a longer one loses its middle. Default: as many as the model has positions for.",
        metavar="TOKENS",
    ),
    limit: int | None = option(f"Most windows of each length, or prompts. Default {_WINDOWS} windows, all prompts.", min=1),
    tokens: int = option("Tokens compared after each prompt.", 16, min=1),
    seed: options.Seed = 0,
    as_json: options.Lines = False,
    out: options.Out = None,
) -> None:
    """Measure how far methods' next-token distributions are from full attention's on your own text.

    Full attention prefills each prompt once and answers it greedily, through the chat template where the tokenizer has one; windows
    of a --file without a --question are followed by the text itself. Every method is sent the same tokens after the same prefill.
    KL(full || method) in nats a token: the mean with a bootstrap interval over prompts, the 99th percentile, and the share of
    tokens whose likeliest next token is the same.
    """
    if (file is None) == (prompts is None):
        raise typer.BadParameter("give one of --file and --prompts", param_hint="--file")
    if question is not None and file is None:
        raise typer.BadParameter("a question is asked about a --file", param_hint="--question")
    lengths = None if length is None else listed(length, tokens_of, "--length")
    if prompts is not None and lengths is not None and len(lengths) > 1:
        raise typer.BadParameter("with --prompts it is one number", param_hint="--length")
    from kvthaw.evaluate.files import read_prompts

    text = "" if file is None else prompt_text(None, file)
    given = [] if prompts is None else read_prompts(prompts, limit)  # before anything slow
    limited = methods if methods.budget or methods.retrieved else replace(methods, budget=_BUDGETS)
    variants, asked = limited.variants(), template.asked()
    from kvthaw.engine.chat_template import Chat
    from kvthaw.evaluate.agreement import (
        Agreement,
        Comparison,
        longest,
        questions,
        summarize,
        usual_length,
        whole_prompts,
        windows,
    )
    from kvthaw.evaluate.report import agreements
    from kvthaw.evaluate.results import ResultsFile

    results = ResultsFile(out)
    llm, tokenizer = loading.load([each.cache for each in variants], asked, template=template.template())
    how = asked or (Chat() if template.chat is None and tokenizer.chat_template is not None else None)

    def made() -> list[Prompt]:
        if prompts is not None:
            most = min(longest(llm, tokens), *(lengths or ()), 1 << 31)
            return whole_prompts(tokenizer, given, most, how)
        return [
            one
            for size in sorted(lengths or [usual_length(tokenizer, text)])
            for one in (
                windows(tokenizer, text, size, limit or _WINDOWS, tokens)
                if question is None
                else questions(tokenizer, text, question, size, limit or _WINDOWS, how)
            )
        ]

    work = Comparison(tuple(dict.fromkeys(made())), tokens)
    if shortened := sum(prompt.cut for prompt in work.prompts):
        warned(f"{shortened} of {counted(len(work.prompts), 'prompt')} lost the middle, being too long")
    longest_prompt = max(len(prompt.tokens) for prompt in work.prompts)
    if whole := [each.budget for each in variants if isinstance(each.budget, int) and each.budget >= longest_prompt + tokens]:
        warned(f"a budget of {min(whole):,} covers all of these prompts, of at most {counted(longest_prompt, 'token')}")
    with bars() as progress:
        runner = Agreement(llm, tokenizer, results, name=loading.model)
        found = runner.run(work, variants, shown(progress, "agreement", len(work.prompts)))
    tell_outdated(results.outdated)
    summaries: list[dict[str, Any]] = [summarize(records, seed) for records in found.values()]
    print_results(summaries, as_json, lambda: [agreements(summaries)])
