"""Prefill once, then fork the cache to see what each method and budget answers."""

import kvthaw
from kvthaw.answering import Answer
from kvthaw.engine.hf.model import load_shipped
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.files import read_asset

model, tokenizer = load_shipped()
words = read_asset("book.txt").split()[:700]
words.insert(280, "One of the special magic numbers for quiet-harbor is: 4417382.")
asked = "the special magic number for quiet-harbor mentioned in the provided text"
prompt = tokenizer(f"{' '.join(words)}\nWhat is {asked}? {asked.capitalize()} is")["input_ids"]
base = kvthaw.Cache(model, "full")
logits = prefill(model, base, prompt)

for method in ("oracle", "icecache-digest", "streaming"):
    for budget in (64, 256):
        cache = base.fork(method, budget=budget)
        text = "".join(Answer(model, tokenizer, cache, logits, sampling=kvthaw.Sampling(max_tokens=12, stop=["\n"])))
        print(f"{method:15} {budget:4}: {text.strip():20} {cache.stats().attended_mean:.0f} of {len(prompt)} tokens attended")
