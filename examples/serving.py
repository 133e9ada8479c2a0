"""A serving loop: requests join and leave a running batch between steps, and each gets the answer that it would get alone."""

import math

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.evaluate.tasks import TASKS

model, tokenizer = load_shipped()
samples = [TASKS["passkey"].sample(tokenizer, length=length, seed=length) for length in (384, 640, 512)]
waiting = {i: tokenizer(sample.prompt)["input_ids"] for i, sample in enumerate(samples)}
served: dict[kvthaw.Request, int] = {}
sampling = kvthaw.Sampling(max_tokens=8, ignore_eos=True, stop=[".", "\n"], logprobs=0)

batch = kvthaw.Batch(model, "icecache-digest", max_seqs=2, capacity=1024, budget=128)
while waiting or batch.requests:
    while waiting and batch.free:
        i, prompt = waiting.popitem()
        served[batch.join(prompt, sampling=sampling, tokenizer=tokenizer)] = i
    for request in batch.step():
        if request.finished:
            answer, planted = request.text.strip(), samples[served[request]].answers[0]
            sure = math.exp(sum(one.logprob for one in request.logprobs))
            print(f"{request.prompt} tokens in sequence {request.seq}: {answer} ({sure:.0%} sure; planted: {planted})")
print(f"{batch.stats().attended_mean:.0f} tokens attended a step")
