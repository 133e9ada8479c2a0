"""kvthaw's side: `python -m lab.beside.kvthaw_side PLAN`.

One model of random weights serves all cases of the process. A `Scheduler` serves one prompt over a `Batch`, and many requests over
one that was warmed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw import Batch, Sampling, Scheduler
from kvthaw.cache.host_memory import available_host_memory
from kvthaw.config import CacheConfig
from kvthaw.engine.hf.attention import choose_flash_attention_4
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.engine.hf.layer import FLASH_ATTENTION_4
from kvthaw.engine.warm import frozen, warm
from kvthaw.evaluate.machine import where
from kvthaw.method_names import AUTO
from kvthaw.methods import resolve
from lab.arrivals import Arrival, random_prompt
from lab.bench.card import provenance
from lab.bench.shapes import build
from lab.beside.cases import MANY, Case, coming_of, config_of, emit, first_of, planned, serve_cases, steps_of
from lab.fill import prompts_drawn
from lab.quantised import WEIGHTS
from lab.trace import replay

MARGIN = 6 << 30
"""Bytes of the device that a batch of as many sequences as fit leaves for activations and captures."""
HOST_SHARE = 0.8
"""Share of the host's free memory that the rows of such a batch may take."""


class Side:
    """A model, and the latest batch of it, which cases of one kind share."""

    def __init__(self, cases: list[Case], options: dict[str, Any]) -> None:
        self.options, (self.device, _) = options, where()
        self.longest = max((room_of(case) for case in cases if case.part in MANY), default=0)
        self.precision, begin = cases[0].precision, time.perf_counter()
        if cases[0].card and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(cases[0].card * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        self.model = build(cases[0].shape, self.device, layers=cases[0].layers)
        if self.precision == "fp8":
            WEIGHTS["fp8"](self.model)
        attention = FLASH_ATTENTION_4 if choose_flash_attention_4(self.model) else "cudnn"
        self.vocabulary: int = self.model.config.vocab_size
        self.about = provenance(options["commit"]) | {"start_s": round(time.perf_counter() - begin, 1), "attention": attention}
        self._latest: tuple[tuple[str, int], Batch] | None = None

    def sizes(self, method: str) -> dict[str, Any]:
        """Return the settings of a batch under a method."""
        if method != AUTO and resolve(method).dense:
            return {}
        found = {} if self.precision == "bf16" else {"kv_dtype": "fp8"}
        if method.startswith(("pariskv", "thaw")):
            return found | {"retrieved": self.options["retrieved"]}
        return found | {"budget": self.options["budget"]} | ({"device_memory": "auto"} if method == AUTO else {})

    def one(self, case: Case) -> Batch:
        """Return a batch of one sequence."""
        return self._kept(case.method, 1, case.length + int(self.options["new"]) + 8)

    def _kept(self, method: str, seqs: int, capacity: int, **how: Any) -> Batch:
        """Return the latest batch if it is of the same kind, else a new one."""
        kind = method, capacity
        if self._latest is None or self._latest[0] != kind:
            self.free()
            batch = Batch(self.model, method, max_seqs=seqs, capacity=capacity, **how, **self.sizes(method))
            self._latest = kind, batch
        return self._latest[1]

    def free(self) -> None:
        """Drop the latest batch."""
        if self._latest is not None:
            self._latest[1].cache.reset()
        self._latest = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure a case."""
        try:
            with frozen():
                return {"about": self.about, **getattr(self, case.part)(case)}
        except Exception:
            self.free()  # the batch may be half warmed
            raise

    def first(self, case: Case) -> dict[str, Any]:
        """Time the first tokens of two prompts, one after the other: the first takes host memory from the system."""
        batch = self.one(case)
        return first_of([timed(batch, prompt, 1)[0] for prompt in self.prompts(case, 2)])

    def decode(self, case: Case) -> dict[str, Any]:
        """Time the tokens after one prompt. The steps of a short one are captured first."""
        batch = self.one(case)
        timed(batch, random_prompt(self.vocabulary, min(case.length, 4096), 1 << 20), 8)
        times = timed(batch, self.prompts(case, 1)[0], case.new)
        return first_of(times[:1]) | steps_of(times)

    def batch(self, case: Case) -> dict[str, Any]:
        """Time the steps of as many prompts as fit, whose keys and values are drawn."""
        self.free()
        capacity = case.length + case.new + 8
        seqs = min(case.seqs or 64, self.fitting(case.method, capacity))
        batch = Batch(self.model, case.method, max_seqs=seqs, capacity=capacity, **self.sizes(case.method))
        try:
            return {"filled": True} | steps_of(together(batch, self.prompts(case, seqs), case.new), seqs)
        finally:
            batch.cache.reset()

    def fitting(self, method: str, capacity: int) -> int:
        """Return how many sequences of a batch fit the device, and the host where it holds their rows."""
        config, cuda = self.model.config, self.device.type == "cuda"
        rows: int = (
            4 * config.num_key_value_heads * config.head_dim * capacity * config.num_hidden_layers
        )  # K and V of two bytes
        host = int(HOST_SHARE * (available_host_memory() or 1 << 62)) // rows
        if not cuda:
            return max(1, min(4, host))
        free, dense = torch.cuda.mem_get_info()[0] - MARGIN, resolve(method).dense
        each = rows if dense else sequence_bytes(self.model, method, capacity, CacheConfig(**self.sizes(method)))
        return max(1, free // each if dense else min(host, free // each))

    def short(self, case: Case) -> dict[str, Any]:
        """Serve many requests."""
        return self._many(case.method, coming_of(case, ""))

    def trace(self, case: Case) -> dict[str, Any]:
        """Serve the requests of a trace."""
        return self._many(case.method, coming_of(case, self.options["traces"]))

    def _many(self, method: str, coming: list[Arrival]) -> dict[str, Any]:
        begin, seqs = time.perf_counter(), int(self.options["places"])
        if method != AUTO and resolve(method).dense:
            seqs = min(seqs, self.fitting(method, self.longest))
        batch = self._kept(method, seqs, self.longest)
        if not batch.stats().captures:
            warm(batch)
        warmed, scheduler = time.perf_counter() - begin, Scheduler(batch)
        replay(scheduler, [Arrival(0.0, one.prompt, 1) for one in coming], seeds=1 << 20)
        replay(scheduler, [Arrival(0.0, one.prompt, min(16, one.new)) for one in coming[:64]], seeds=1 << 20)
        return {"warm_s": warmed, "places": seqs} | replay(scheduler, coming)

    def prompts(self, case: Case, count: int) -> list[Tensor]:
        """Draw the prompts of a case."""
        return [random_prompt(self.vocabulary, case.length, seed) for seed in range(count)]

    def check(self, case: Case) -> dict[str, Any]:
        """Write the weights for vLLM, and return greedy tokens of some prompts and the likeliest first tokens."""
        from safetensors.torch import save_file

        folder = Path(self.options["checkpoint"])
        weights = {name: weight.contiguous().cpu() for name, weight in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = config_of(self.options["sizes"], case.layers, 131072)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        batch, answers = Batch(self.model, "full", max_seqs=1, capacity=case.length + case.new), []
        for prompt in self.prompts(case, case.seqs):
            how = Sampling(temperature=0.0, max_tokens=case.new, ignore_eos=True, logprobs=20)
            request = batch.join(prompt, sampling=how)
            while not request.finished:
                batch.step()
            answers.append({"tokens": request.tokens, "top": request.logprobs[0].top})
        return {"answers": answers}


def room_of(case: Case) -> int:
    """Return the tokens that a sequence of a case with many requests may have."""
    return case.length + case.new + 8


def timed(batch: Batch, prompt: Tensor, new: int) -> list[float]:
    """Serve one request by a Scheduler, as `kvthaw serve` does. Returns the seconds until each of its tokens."""
    scheduler, begin, times = Scheduler(batch), time.perf_counter(), list[float]()
    request = scheduler.submit(prompt, max_new_tokens=new, stop=())
    while scheduler.busy:
        told = scheduler.step()
        times += [time.perf_counter() - begin] * len(told)
    if request.error is not None:
        raise request.error
    return times


def together(batch: Batch, prompts: list[Tensor], new: int) -> list[float]:
    """Decode prompts together, their keys and values drawn. Returns when each step ended."""
    with prompts_drawn(batch.model):
        for prompt in prompts:
            request = batch.join(prompt, max_new_tokens=new, stop=())
            batch.prefill(request, request.prompt)
        batch.start(timeout=None)
        batch.read()
    times = list[float]()
    while batch.requests:
        batch.launch()
        for request in batch.read(ahead=True):
            if request.error is not None:
                raise request.error
        times.append(time.perf_counter())
    return times


def main() -> None:
    """Measure the cases of a plan."""
    cases, options = planned(sys.argv)
    side = Side(cases, options)
    emit("ready", about=side.about)
    serve_cases(cases, side.measure)


if __name__ == "__main__":
    main()
