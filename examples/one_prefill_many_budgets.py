"""Prefill once, then fork the cache to see what each method and budget answers."""

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.answers import Answers
from kvthaw.evaluate.probe import Probe
from kvthaw.evaluate.tasks import TASKS

model, tokenizer = load_shipped()
sample = TASKS["niah_single"].sample(tokenizer, length=1024, seed=2, depth=0.4)
base = kvthaw.Cache(model, "full")
logits = prefill(model, base, tokenizer(sample.prompt)["input_ids"])

print("planted:", sample.answers[0])
for method in ("oracle", "icecache-digest", "streaming"):
    for budget in (64, 256):
        cache = base.fork(method, budget=budget)
        probe = Probe(cache, reference=base)
        answers = Answers(model, tokenizer, cache)
        text = "".join(piece or "" for (piece,) in answers.stream(logits[None], [[]], 12)).strip()
        print(f"{method:10} {budget:4}: {text:20} attention mass {probe.quality().attention_mass:.2f}")
