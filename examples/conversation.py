"""Several questions about one context: the cache stays, and keeps the context alone before each next question."""

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.answers import Answers
from kvthaw.evaluate.tasks import niah

facts = {"quiet-harbor": "4417382", "amber-lantern": "9052816", "rusty-compass": "2760935"}
model, tokenizer = load_shipped()
needles = [niah.NEEDLE.format(kind="numbers", key=key, value=value) for key, value in facts.items()]
book = niah.Haystack.of(None).with_facts(1200, needles, [0.2, 0.5, 0.8])
context = tokenizer(niah.INTRO.format(kind="numbers") + book)["input_ids"]

cache = kvthaw.Cache(model, method="icecache-digest", budget=256)
logits = prefill(model, cache, context)
for key, value in facts.items():
    question = tokenizer(niah.QUESTION_ONE.format(one="number", query=key), add_special_tokens=False)["input_ids"]
    answers = Answers(model, tokenizer, cache)
    text = "".join(piece or "" for (piece,) in answers.stream(logits[None], [question], 12)).strip()
    print(f"{key}: {text}   (planted: {value})")
    cache.keep(len(context))

print(cache.stats())
