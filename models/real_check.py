"""Runs kvthaw on a pretrained model, as `make real` does: text under budgets that cover everything, agreement under smaller ones.

    python models/real_check.py FILE.gguf

Exit code 1 where greedy text differs from plain transformers', or where methods do not stand as they must.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from rich.console import Console

import kvthaw
from kvthaw.engine.chat_template import Chat
from kvthaw.engine.hf.model import load, silence
from kvthaw.evaluate.agreement import Agreement, Comparison, questions, summarize, windows
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.report import agreements
from kvthaw.evaluate.variant import read_variants

TOKENS = 12
COVERING = ("full", "thaw", "icecache-digest", "pariskv-plus", "clusterkv-plus")
QUESTIONS = {
    "What happens here?": 128,
    "Who speaks here, and to whom?": 192,
    "Continue the text.": 256,
    "Summarize this in a sentence.": 384,
}
"""What is asked, behind prompts of so many tokens; four prompts each."""


def main(name: str) -> int:
    """Run all of it, and print what was found. Returns the exit code."""
    silence()
    begun = time.monotonic()
    model, tokenizer = load(name, device="cpu", dtype="float32")
    wrong = []
    for part in (texts, distances):
        print(f"{time.monotonic() - begun:.0f} s: {part.__name__}", flush=True)
        wrong += part(model, tokenizer, name)
    for one in wrong:
        print(f"WRONG: {one}", file=sys.stderr)
    print(f"{time.monotonic() - begun:.0f} s: {'WRONG' if wrong else 'all is right'}")
    return 1 if wrong else 0


def texts(model: Any, tokenizer: Any, name: str) -> list[str]:
    """Answer 16 prompts under budgets that cover everything. Returns where the tokens differ from plain transformers'."""
    chat, book, wrong = Chat() if tokenizer.chat_template else None, read_asset("book.txt"), []
    for prompt in (one for asked, n in QUESTIONS.items() for one in questions(tokenizer, book, asked, n, 4, chat)):
        ids = torch.tensor([prompt.tokens])

        def answer(ids: torch.Tensor = ids, **cache: Any) -> list[int]:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **cache)
            found: list[int] = out[0, ids.shape[1] :].tolist()
            return found

        plain = answer()
        print(f"plain transformers, {ids.shape[1]} tokens: {tokenizer.decode(plain)!r}", flush=True)
        for method in COVERING:
            limits: dict[str, Any] = {} if method == "full" else {"budget": ids.shape[1] + 2 * TOKENS}
            found = answer(past_key_values=kvthaw.Cache(model, method, **limits))
            if found != plain:
                wrong.append(f"{method} under a budget that covers everything answers {tokenizer.decode(found)!r}")
    return wrong


def distances(model: Any, tokenizer: Any, name: str) -> list[str]:
    """Compare methods with full attention. Returns what cannot be."""
    chat, book = Chat() if tokenizer.chat_template else None, read_asset("book.txt")
    asked = questions(tokenizer, book, "What happens here?", 1024, 2, chat)
    followed = windows(tokenizer, book, 1024, 2, TOKENS)
    variants = read_variants("icecache-digest,thaw,streaming", [64, 256])
    variants += read_variants("icecache-digest", [1024 + 2 * TOKENS])
    wrong = []
    for what, prompts in (("answers", asked), ("the text", followed)):
        records = Agreement(model, tokenizer, name=name).run(Comparison(tuple(prompts), TOKENS), variants)
        found = {variant: summarize(some) for variant, some in records.items()}
        Console(width=140).print(agreements(list(found.values())))
        kl = {(variant.method, variant.budget): one["kl"] for variant, one in found.items()}
        if (covered := kl["icecache-digest", 1024 + 2 * TOKENS]) > 1e-5:
            wrong.append(f"{what}: a budget that covers everything is {covered:.2g} nats from full attention")
        for method in ("icecache-digest", "thaw"):
            if not kl[method, 256] < min(kl[method, 64], kl["streaming", 256]):
                wrong.append(f"{what}: {method} under 256 tokens is no nearer than under 64, or than streaming")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
