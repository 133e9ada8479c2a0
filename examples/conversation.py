"""Several questions about one text: each prompt is whole, and what an earlier one began with is not prefilled again."""

import torch

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.evaluate.files import read_asset

facts = {"quiet-harbor": "4417382", "amber-lantern": "9052816", "rusty-compass": "2760935"}
model, tokenizer = load_shipped()
words = read_asset("book.txt").split()[:1200]
for at, (key, value) in zip((960, 600, 240), facts.items(), strict=True):
    words.insert(at, f"One of the special magic numbers for {key} is: {value}.")
context = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the "
)
context += "numbers afterwards.\n" + " ".join(words)

with kvthaw.attach(model, "icecache-digest", budget=256, prefix_cache=kvthaw.PrefixCache()) as handle:
    for key, value in facts.items():
        asked = f"the special magic number for {key} mentioned in the provided text"
        question = f"\nWhat is {asked}? {asked.capitalize()} is"
        prompt = tokenizer(context + question, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip()
        cached = handle.stats().cached_tokens
        print(f"{key}: {text}   (planted: {value}; {cached} of {prompt.shape[1]} prompt tokens were there already)")

print(handle.stats())
