"""kvthaw inspect: a page that shows which tokens an answer recalled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvthaw.cli import options
from kvthaw.cli.common import as_its_makers, prompt_text, tell_template, write_whole
from kvthaw.cli.options import ChatOptions, ModelOptions, VariantOptions, file_option, flat, option
from kvthaw.cli.progress import bars, say
from kvthaw.errors import ConfigError
from kvthaw.formatting import human

EXAMPLES = (
    'Examples:\n\n  kvthaw inspect --model Qwen/Qwen3-8B --file notes.txt --question "Who leads?" -o page.html\n\n'
    '  kvthaw inspect --file notes.txt --question "..." --method icecache-digest --method prkv --budget 128,256 -o page.html'
)
_MOST = 4  # runs of a page


@flat
def inspect(
    loading: ModelOptions,
    methods: VariantOptions,
    template: ChatOptions,
    file: Path = file_option("Read the document from this file.", ...),
    question: str = option("The question, which follows the document in the prompt.", ...),
    out: Path = option("Write the page here.", ..., "--out", "-o", dir_okay=False),
    max_new_tokens: options.MaxNewTokens = 64,
    exact: bool = option("Also compute the exact top-k, which reads all keys at every step.", True),
    temperature: options.Temperature = None,
    seed: options.Seed = 0,
) -> None:
    """Answer a question about a document, and write a page that shows which tokens each step recalled.

    The page is one file of at most 10 MB that opens without a network. The first method and budget write the answer, which is that
    of kvthaw generate with the same options; the others decode the same tokens.
    """
    variants = methods.variants()
    if len(variants) > _MOST:
        raise ConfigError(f"{len(variants)} methods and budgets are given; a page shows at most {_MOST}")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out is {str(out)!r}; its folder does not exist or cannot be written to")
    document, asked = prompt_text(None, file), template.asked()
    from kvthaw.evaluate.variant import check_retrieves, complete

    for each in variants:  # what is wrong costs no loading
        check_retrieves(each)
    from kvthaw.engine.chat_template import Chat, has_template
    from kvthaw.engine.generation_config import stop_tokens
    from kvthaw.engine.sampling import Sampling
    from kvthaw.engine.text import decode
    from kvthaw.inspect.page import standalone
    from kvthaw.inspect.run import inspect as run

    llm, tokenizer = loading.load([each.cache for each in variants], asked, document, template.template())
    undecided = template.chat is None and asked is None
    if undecided:
        asked = Chat() if has_template(tokenizer) else None
    variants = [complete(llm, variant) for variant in variants]
    if undecided:  # nothing is refused any more
        tell_template(loading.model, tokenizer, taken=asked is not None)
    given: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    sampling = as_its_makers(Sampling(seed=seed, **given), given, llm)
    with bars() as progress:
        task = progress.add_task("prefill", total=None)
        found = run(
            llm, tokenizer, document, question, variants, limit=max_new_tokens, exact=exact, chat=asked, sampling=sampling,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    page = standalone(found, tokenizer, f"{file.name}: {question.strip()}")
    write_whole(out, page)
    stops = stop_tokens(llm, tokenizer)
    print(decode(tokenizer, [token for token in found.answer if token not in stops], special=False))
    say(f"wrote {out}, {human(len(page.encode()))}")
