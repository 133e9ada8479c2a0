"""A serving loop: requests join and leave a running batch between steps, and each gets the answer that it would get alone."""

import kvthaw
from kvthaw.evaluate.model import load_shipped
from kvthaw.evaluate.tasks import TASKS

model, tokenizer = load_shipped()
samples = [TASKS["passkey"].sample(tokenizer, length=length, seed=length) for length in (384, 640, 512)]
waiting = {i: tokenizer(sample.prompt)["input_ids"] for i, sample in enumerate(samples)}
served: dict[kvthaw.Request, int] = {}

batch = kvthaw.Batch(model, "icecache", lanes=2, capacity=1024, budget=128)
while waiting or batch.requests:
    while waiting and batch.free:
        i, prompt = waiting.popitem()
        served[batch.join(prompt, max_new_tokens=8, stop=())] = i
    for request in batch.step():
        if request.finished:
            answer = tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
            print(f"{request.prompt} tokens in lane {request.lane}: {answer} (planted: {samples[served[request]].answers[0]})")
print(f"{batch.stats().attended_mean:.0f} tokens attended a step")
