"""Attach kvthaw to a model: plain generate() then attends to a few tokens of a long prompt at each step."""

import kvthaw
from kvthaw.engine.hf.model import load_shipped

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

model, tokenizer = load_shipped()  # any causal language model of transformers will do
prompt = FILLER * 15 + "The pass key is 48213. Remember it. 48213 is the pass key. " + FILLER * 30
inputs = tokenizer(prompt + "\nWhat is the pass key? The pass key is", return_tensors="pt").to(model.device)

with kvthaw.attach(model, method="icecache-digest", budget=128) as handle:
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    stats = handle.stats()

print("answer:", tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
print("planted: 48213")
print(
    f"{stats.attended_mean:.0f} of {stats.tokens} tokens attended a step, {stats.kv_device_bytes:,} bytes of KV on the device"
)
