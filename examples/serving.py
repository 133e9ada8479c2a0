"""A serving loop: requests join and leave a running batch between steps, and each gets the answer that it would get alone."""

import math

import kvthaw
from kvthaw.engine.hf.model import load_shipped

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def prompt(key: int, length: int) -> str:
    """Return a text of `length` sentences in which a pass key is hidden, and the question for it."""
    fact = f"The pass key is {key}. Remember it. {key} is the pass key. "
    return FILLER * (length // 10) + fact + FILLER * (length // 10) + "\nWhat is the pass key? The pass key is"


model, tokenizer = load_shipped()
waiting = {key: tokenizer(prompt(key, length))["input_ids"] for key, length in ((48213, 80), (90571, 130), (17346, 100))}
served: dict[kvthaw.Request, int] = {}
sampling = kvthaw.Sampling(max_tokens=8, ignore_eos=True, stop=[".", "\n"], logprobs=0)

batch = kvthaw.Batch(model, "icecache-digest", max_seqs=2, capacity=1024, budget=128)
while waiting or batch.requests:
    while waiting and batch.free:
        key, ids = waiting.popitem()
        served[batch.join(ids, sampling=sampling, tokenizer=tokenizer)] = key
    for request in batch.step():
        if request.finished:
            answer, planted = request.text.strip(), served[request]
            sure = math.exp(sum(one.logprob for one in request.logprobs))
            print(f"{request.prompt} tokens in sequence {request.seq}: {answer} ({sure:.0%} sure; planted: {planted})")
print(f"{batch.stats().attended_mean:.0f} tokens attended a step")
