"""Prefill once, then fork the cache to see what each method and budget answers."""

from kvthaw.evaluate.decode import prefill, stop_tokens

import kvthaw
from kvthaw.evaluate.answers import Answer
from kvthaw.evaluate.model import load_shipped
from kvthaw.evaluate.probe import Probe
from kvthaw.evaluate.tasks import TASKS

model, tokenizer = load_shipped()
sample = TASKS["niah_single"].sample(tokenizer, length=2048, seed=2, depth=0.4)
base = kvthaw.Cache(model, "full")
logits = prefill(model, base, tokenizer(sample.prompt)["input_ids"])

print("planted:", sample.answers[0])
for method in ("oracle", "icecache", "streaming"):
    for budget in (64, 256):
        cache = base.fork(method, budget=budget)
        probe = Probe(cache, reference=base)
        answer = Answer(model, tokenizer, cache, stop_tokens(model, tokenizer))
        text = "".join(answer.stream(logits, [], 12)).strip()
        print(f"{method:10} {budget:4}: {text:20} attention mass {probe.quality().attention_mass:.2f}")
