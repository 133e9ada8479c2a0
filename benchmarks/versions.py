"""Time captured decode steps through the public API alone, so that two versions of kvthaw can be compared in one session.

Run it once for each version, with that version first on PYTHONPATH: `python versions.py LABEL OUT [RUN ...]`. Every method
decodes random tokens after a prompt of random tokens. A step is timed from its call until the device is done, `host_median_ms`
until it returns.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import kvthaw

SIZES: dict[str, dict[str, Any]] = {
    "full": {},
    "pariskv": {"retrieved": 100},
    "pariskv-plus": {"retrieved": 100},
    "clusterkv-plus": {"budget": 1024},
    "prkv": {"budget": 1024},
}
WARM = 24
_LARGE = {"layers": 16, "hidden": 4096, "new_tokens": 48}
_METHODS = ("full", "pariskv-plus", "clusterkv-plus", "prkv", "icecache-digest-device", "icecache-digest")
_BEFORE = {
    "icecache-digest-device": "icecache-device",
    "icecache-digest": "icecache",
    "clusterkv-plus": "clusterkv",
    "pariskv-plus": "pariskv",
}
"""What methods were called in versions that have them under no other name."""
RUNS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "36k": ({**_LARGE, "length": 36864, "batch": 1}, _METHODS),
    "128k": ({**_LARGE, "length": 131072, "batch": 1}, _METHODS),
    "eight": ({**_LARGE, "length": 16384, "batch": 8}, _METHODS[:4]),
    "host": ({"layers": 30, "hidden": 512, "length": 1024, "batch": 24, "new_tokens": 200}, _METHODS[:3]),
}
"""Sizes and methods by name: one long sequence, a batch of eight, and 24 short ones for the host's time."""


def build(layers: int, hidden: int) -> transformers.PreTrainedModel:
    """Build a Llama of random bf16 weights with 32 query and 8 KV heads of 128 dimensions."""
    config = transformers.LlamaConfig(
        vocab_size=1024 if hidden < 4096 else 128256,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 20,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


@torch.no_grad()
def measure(model: transformers.PreTrainedModel, method: str, length: int, batch: int, new_tokens: int) -> dict[str, Any]:
    """Milliseconds a step of one method."""
    rng = torch.Generator("cuda").manual_seed(1)
    prompt, tokens = (torch.randint(0, 1024, (batch, n), device="cuda", generator=rng) for n in (length, WARM + new_tokens))
    whole, host = [], []
    name = method if method in kvthaw.METHODS else _BEFORE[method]
    with kvthaw.attach(model, name, **SIZES.get(method, {"budget": 256})) as handle:
        model(prompt, logits_to_keep=1)
        for i in range(WARM + new_tokens):
            positions = torch.full((batch, 1), length + i, device="cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(tokens[:, i : i + 1], past_key_values=handle.cache, position_ids=positions, logits_to_keep=1)
            host.append(1e3 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
            whole.append(1e3 * (time.perf_counter() - begin))
        captures = handle.stats().captures
    whole, host = sorted(whole[WARM:]), sorted(host[WARM:])
    return {
        "mean_ms": round(statistics.mean(whole), 3),
        "median_ms": round(statistics.median(whole), 3),
        "p95_ms": round(whole[int(0.95 * len(whole))], 3),
        "host_median_ms": round(statistics.median(host), 3),
        "captures": captures,
    }


def main(label: str, out: Path, names: list[str]) -> None:
    """Measure every run that is named, or all, one JSON line a method."""
    shape, model = None, None
    for name in names or RUNS:
        sizes, methods = RUNS[name]
        if model is None or shape != (sizes["layers"], sizes["hidden"]):
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            shape = sizes["layers"], sizes["hidden"]
            model = build(*shape)
        for method in methods:
            found = measure(model, method, sizes["length"], sizes["batch"], sizes["new_tokens"])
            line = {"setting": {"method": method, **sizes, "steps": "captured", "version": label}, **found}
            line |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
            print(json.dumps(line), flush=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
