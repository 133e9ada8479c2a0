"""Full attention as others would take it, beside a sparse method, on one model in one run.

`python -m lab.rivals --out rivals.jsonl` on a GPU: the 8B shape, random weights, one sequence with drawn keys and values. A
JSON line for each length and rival:

- full: kvthaw's full attention, captured, KV in bfloat16. full-fp8: the same model and graph with all KV as
  e4m3 on the device, without scales (a GPU only). static: transformers' StaticCache in generate(), which compiles it and captures
  graphs by itself. pariskv-plus: 100 rows retrieved, KV on the host. pariskv-plus-fp8: the same with rows in 8 bits
  (kv_dtype="fp8") and the KV of its dense layers as full-fp8 has it, which is no option of the library. Keys and values are drawn
  among the numbers that e4m3 has.
- ms, median_ms, p99_ms: a token. off: how far the first step's logits are off the first rival's, of their norm; at most .1 where
  all is attended to. error: instead of these.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StaticCache

from kvthaw.bench.decode import free
from kvthaw.bench.steps import Counts, Steps, take
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.fused import fusing
from kvthaw.errors import CacheError
from lab.bench.shapes import build, random_tokens
from lab.fill import drawn, fill
from lab.script import Report, options, run_as_script

SPARSE = ("pariskv-plus", "pariskv-plus-fp8")
RIVALS = ("full", "full-fp8", "static", *SPARSE)
_WARM = 12  # tokens of generate() in which it compiles and captures


class Laps:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.laps: list[float] = []

    def put(self, value: Tensor) -> None:
        self.laps.append(time.perf_counter())

    def end(self) -> None:
        pass


def filled(model: PreTrainedModel, rival: str, length: int, steps: int) -> Cache | StaticCache:
    """Return a cache with keys and values for a prompt of this length, the same for all layers."""
    same = drawn(model, 0, length, 0)
    same.rows.copy_(same.rows.to(torch.float8_e4m3fn))
    if rival == "static":
        model.set_attn_implementation("sdpa")  # a Cache brings its own
        cache: Any = StaticCache(config=model.config, max_cache_len=length + steps + _WARM + 2)
        with torch.no_grad():
            fill(cache, lambda layer: same)
        return cache
    sparse, fp8 = rival in SPARSE, rival.endswith("fp8")
    how: dict[str, Any] = {"retrieved": 100, "kv_dtype": "fp8" if fp8 else None} if sparse else {}
    cache = Cache(model, SPARSE[0] if sparse else "full", **how)
    fill(cache, lambda layer: same, shared=sparse, coming=steps if sparse else 0)
    for layer in cache.kv.layers if fp8 else ():
        if isinstance(layer, DenseLayer) and layer.tensors() and layer._data.dtype != torch.uint8:
            layer._data = layer._data.to(torch.float8_e4m3fn)
    return cache


def timed(model: PreTrainedModel, rival: str, length: int, steps: int) -> tuple[dict[str, Any], Tensor]:
    """Return the times of a rival's steps, and the logits of its first."""
    cache = filled(model, rival, length, steps)
    tokens = random_tokens(model, 1, 0)
    with torch.no_grad():
        logits = model(next(tokens), past_key_values=cache, use_cache=True).logits[0, -1].float()
    if isinstance(cache, Cache):
        cuda = model.device.type == "cuda"
        cache.replay = ElasticGraph(fusing(model, model.forward), cache, capture=cuda)
        found = take(model, cache, tokens, steps, capture=True)
        return summary(found), logits
    watch, ids = Laps(), torch.zeros((1, length + 2), dtype=torch.int64, device=model.device)
    config = GenerationConfig(max_new_tokens=steps + _WARM, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, past_key_values=cache, generation_config=config, streamer=watch)
    gaps = tuple(b - a for a, b in pairwise(watch.laps))[_WARM:]
    return summary(Steps(gaps, (Counts(), Counts()), None)), logits


def summary(taken: Steps) -> dict[str, float]:
    """Milliseconds a step."""
    return {"ms": 1e3 * taken.mean, "median_ms": 1e3 * taken.quantile(0.5), "p99_ms": 1e3 * taken.quantile(0.99)}


def main() -> None:
    """Time every rival at every length."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, lengths="36864,131072,524288", rivals=",".join(RIVALS), steps=512, commit=str,
        out=Path,
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(given.shape, device, layers=given.layers)
    report = Report(given.out, given.commit, bench="rivals", shape=given.shape, layers=model.config.num_hidden_layers)
    for length in map(int, given.lengths.split(",")):
        exact = None
        for rival in given.rivals.split(","):
            line: dict[str, Any] = {"rival": rival, "length": length, "steps": given.steps}
            try:
                times, logits = timed(model, rival, length, given.steps)
                exact = logits if exact is None else exact
                off = float((logits - exact).norm() / exact.norm())
                if rival not in SPARSE and not off < 0.1:
                    raise CacheError(f"the first step of {rival} is {off:.3f} of the logits' norm off the first rival's")
                line |= {name: round(ms, 3) for name, ms in times.items()} | {"off": round(off, 4)}
            except Exception as error:  # of memory, or what a device has no instructions for
                line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            report(line)
            free()


if __name__ == "__main__":
    run_as_script(main)
