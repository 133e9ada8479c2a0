"""Processor time of decode steps of a pretrained model on a CPU. Methods take turns at every token, so that all meet the same load.

`python -m lab.cpu_steps --model FILE.gguf --length 4096 --method thaw,icecache-digest --budget 256,1024 --out FILE`

One JSON line a method and budget, full attention's first:

- first_s: from the fork of full attention's prefill until the first step has ended, the index included.
- step_ms, median_ms: of the steps behind it, the mean and the median.

Times count all threads of the process; torch has one.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean, median

import torch

import kvthaw
from kvthaw.cli.options import budget_of, listed, tokens_of
from kvthaw.engine.hf.model import load, silence
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.files import tokens_of as tokenize
from lab.script import Report, options, run_as_script

Asked = tuple[str, int | float | None]
"""A method, and its budget if it has one."""


def main() -> None:
    """Measure, a JSON line a method and budget."""
    given = options(
        __doc__, model=str, length="4096", method="thaw,icecache-digest", budget="256,1024", steps=16, commit=str, out=Path
    )
    silence()
    torch.set_num_threads(1)
    length, report = tokens_of(given.length), Report(given.out, given.commit)
    model, tokenizer = load(given.model, device="cpu", dtype="float32")
    tokens = torch.tensor([tokenize(tokenizer, read_asset("book.txt"))[: length + 1 + given.steps]])
    about = {"model": Path(given.model).stem, "dtype": "float32", "threads": 1, "length": length, "steps": given.steps}

    def step(at: int, cache: kvthaw.Cache) -> float:
        begin = time.process_time()
        model(tokens[:, at : at + 1], past_key_values=cache)
        return time.process_time() - begin

    with torch.inference_mode():
        prefilled = kvthaw.Cache(model, "full")
        model(tokens[:, :length], past_key_values=prefilled, logits_to_keep=1)
        caches: dict[Asked, kvthaw.Cache] = {}
        first: dict[Asked, float] = {}
        budgets = listed([given.budget], budget_of, "--budget")
        for method, budget in [("full", None), *((one, b) for one in given.method.split(",") for b in budgets)]:
            begin = time.process_time()
            cache = prefilled.fork(method) if budget is None else prefilled.fork(method, budget=budget)
            step(length, cache)
            caches[method, budget], first[method, budget] = cache, time.process_time() - begin
        times: dict[Asked, list[float]] = {variant: [] for variant in caches}
        for at in range(length + 1, length + 1 + given.steps):
            for variant, cache in caches.items():
                times[variant].append(step(at, cache))
    for (method, budget), own in times.items():
        found = {"first_s": round(first[method, budget], 3), "step_ms": round(1e3 * fmean(own), 1)}
        report({**about, "method": method, "budget": budget, **found, "median_ms": round(1e3 * median(own), 1)})


if __name__ == "__main__":
    run_as_script(main)
