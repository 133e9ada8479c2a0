"""Attach kvthaw to a model: plain generate() then attends to a few tokens of a long prompt at each step."""

import kvthaw
from kvthaw.engine.hf.model import load_shipped
from kvthaw.evaluate.tasks import TASKS

model, tokenizer = load_shipped()  # any causal language model of transformers will do
sample = TASKS["passkey"].sample(tokenizer, length=1024, seed=1)
inputs = tokenizer(sample.prompt, return_tensors="pt").to(model.device)

with kvthaw.attach(model, method="icecache-digest", budget=128) as handle:
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    stats = handle.stats()

print("asked:", sample.question.strip())
print("answer:", tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
print("planted:", sample.answers[0])
print(
    f"{stats.attended_mean:.0f} of {stats.tokens} tokens attended a step, {stats.kv_device_bytes:,} bytes of KV on the device"
)
