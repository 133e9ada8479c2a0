"""Several questions about one text: each prompt is whole, and what an earlier one began with is not prefilled again."""

import torch

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.evaluate.tasks import niah

facts = {"quiet-harbor": "4417382", "amber-lantern": "9052816", "rusty-compass": "2760935"}
model, tokenizer = load_shipped()
needles = [niah.NEEDLE.format(kind="numbers", key=key, value=value) for key, value in facts.items()]
book = niah.Haystack.of(None).with_facts(1200, needles, [0.2, 0.5, 0.8])
context = niah.INTRO.format(kind="numbers") + book

with kvthaw.attach(model, "icecache-digest", budget=256, prefix_cache=kvthaw.PrefixCache()) as handle:
    for key, value in facts.items():
        question = niah.QUESTION_ONE.format(one="number", query=key)
        prompt = tokenizer(context + question, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip()
        cached = handle.stats().cached_tokens
        print(f"{key}: {text}   (planted: {value}; {cached} of {prompt.shape[1]} prompt tokens were there already)")

print(handle.stats())
