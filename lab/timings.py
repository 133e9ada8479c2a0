"""Steps, rivals, prompts and kernels in one process, which builds the weights of the 8B shape and compiles its step once.

`python -m lab.timings --out FOLDER --seconds 270` on a GPU on which the tests have run, since nothing is compared with
transformers here but the rivals' first step. JOBS are done in order, the most telling first, and those that the seconds left do not
suffice for are left out; `--jobs "steps full 36 128,rival full 128 512"`: these instead. Lines go into decode, rivals, prefill and
kernels_*.jsonl of the folder, each as it is measured; `python -m lab.speed FOLDER` brings them to lab/results and
docs/results.md.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvthaw.bench.decode import free
from kvthaw.bench.shapes import config
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import Record, ResultsFile, noted
from lab import kernels_batches, kernels_pariskv, kernels_rounds, rivals, room
from lab.bench import prefill
from lab.bench.card import provenance
from lab.bench.shapes import build
from lab.filled import FilledBench
from lab.kernels import SHAPE
from lab.plans import Common
from lab.script import Report, brief, options, run_as_script

MANY, FEW = "budget=1024:hits=0.7", "retrieved=100"
FAST = "iterations=4:" + MANY  # k-means of 512k keys takes its time
JOBS: tuple[tuple[int, str, tuple[Any, ...]], ...] = (
    (10, "rival", ("full", 128, 512)),
    (10, "rival", ("full-fp8", 128, 512)),
    (12, "steps", (f"pariskv-plus:{FEW}", 128, 512)),
    (8, "steps", ("full", 128, 128)),
    (10, "steps", (f"clusterkv-plus:{MANY}", 128, 320)),
    (10, "steps", (f"prkv:{MANY}", 128, 512)),
    (12, "steps", (f"clusterkv:{MANY}", 128, 320)),
    (10, "steps", (f"prkv-plus:{MANY}", 128, 512)),
    (10, "steps", ("icecache-digest-device", 128, 256)),
    (12, "steps", (f"pariskv:{FEW}", 128, 512)),
    (15, "steps", (f"pariskv-plus:{FEW}", 512, 512)),
    (15, "steps", (f"pariskv-plus:{FEW}:dense_layers=0", 512, 512)),
    (12, "rival", ("full", 512, 200)),
    (10, "rival", ("full-fp8", 512, 200)),
    (12, "steps", (f"clusterkv-plus:{FAST}", 512, 320)),
    (12, "steps", (f"prkv:{MANY}", 512, 384)),
    (12, "steps", (f"prkv-plus:{MANY}", 512, 384)),
    (12, "kernels", ("rounds",)),
    (7, "prompt", ("pariskv-plus", 128, 128, 8)),
    (7, "prompt", ("pariskv-plus", 128, 16, 8)),
    (5, "kernels", ("encode",)),
    (7, "prompt", ("hf-dynamic", 128, 128, 8)),
    (7, "prompt", ("clusterkv-plus", 128, 128, 8)),
    (7, "prompt", ("clusterkv-plus", 128, 16, 8)),
    *((20 if n > 512 else 12, "steps", (f"pariskv-plus:{FEW}:kv_dtype=fp8", n, 512)) for n in (128, 512, 1024)),
    *((20 if n > 512 else 12, "rival", ("pariskv-plus-fp8", n, 512)) for n in (128, 512, 1024)),
    (20, "steps", (f"pariskv-plus:{FEW}", 1024, 512)),
    (20, "steps", (f"pariskv-plus:{FEW}:dense_layers=0", 1024, 512)),
    (7, "prompt", ("prkv-plus", 128, 128, 8)),
    (7, "prompt", ("prkv-plus", 128, 16, 8)),
    (6, "steps", ("full", 512, 64)),
    (8, "kernels", ("batches", 4, 32)),
    (8, "kernels", ("batches", 16, 32)),
    (8, "kernels", ("batches", 64, 32)),
    (16, "steps", (f"clusterkv:{FAST}", 512, 320)),
    (6, "kernels", ("select",)),
    (40, "prompt", ("pariskv-plus", 512, 16, 4)),
    (14, "steps", ("icecache-digest-device", 512, 128)),
    (15, "steps", (f"pariskv:{FEW}", 512, 512)),
    (8, "kernels", ("batches", 8, 128)),
)
"""Seconds that must be left (as expected on an H200), what is done, and with what: a method or rival, thousands of tokens, then how
many steps; or of a prompt thousands of tokens at once and layers; or of kernels a batch and thousands of tokens."""


class Timings:
    """What JOBS ask for. shrink divides lengths, steps and budgets, to try it on a small machine."""

    def __init__(self, out: Path, commit: str | None, shape: str, shrink: int) -> None:
        self.out, self.commit, self.shape, self.shrink = out, commit, shape, shrink
        self.device, name = where()
        self.bench = FilledBench(ResultsFile(out / "decode.jsonl"), commit=commit, say=lambda record: noted(brief(record)))
        self.bench.unchecked = True
        self.common = Common(shape, ("captured",), name, self.device.type == "cuda", 0)
        self.layers = config(shape).num_hidden_layers
        self.exact: dict[int, torch.Tensor] = {}  # logits of full attention, by length
        self.part: tuple[int, PreTrainedModel] | None = None  # some layers
        self.bench.prepare(shape)

    def tokens(self, thousands: int) -> int:
        """Return as many tokens as are measured for so many thousands."""
        return thousands * 1024 // self.shrink

    def steps(self, method: str, thousands: int, count: int) -> None:
        """Decode with rows of one layer on the host."""
        one = self.common.run(method, self.tokens(thousands), new_tokens=max(8, count // self.shrink), shared=method != "full")
        budget = None if one.budget is None else max(32, int(one.budget) // self.shrink)
        retrieved = None if one.retrieved is None else max(8, int(one.retrieved) // self.shrink)
        self.bench.run([replace(one, budget=budget, retrieved=retrieved)])

    def rival(self, name: str, thousands: int, count: int) -> None:
        """Decode as a rival does; see lab/rivals.py."""
        report = Report(self.out / "rivals.jsonl", self.commit, bench="rivals", shape=self.shape, layers=self.layers)
        length = self.tokens(thousands)
        times, logits = rivals.timed(self.bench.model, name, length, max(8, count // self.shrink))
        exact = self.exact.setdefault(length, logits)
        off = round(float((logits - exact).norm() / exact.norm()), 4)
        line = {"rival": name, "length": length, "steps": count, "off": off}
        report(line | {of: round(ms, 3) for of, ms in times.items()})

    def prompt(self, method: str, thousands: int, chunk: int, layers: int) -> None:
        """Take a prompt in, through some of the layers."""
        layers = min(layers, self.layers)
        if self.part is None or self.part[0] != layers:
            self.part = None
            free()
            self.part = layers, build(self.shape, self.device, layers=layers)
        sizes: dict[str, int | None] = {"budget": 1024 // self.shrink, "retrieved": None, "dense_layers": 0}
        if "pariskv" in method:
            sizes |= {"budget": None, "retrieved": 100 // self.shrink}
        if method == prefill.HF:
            sizes = dict.fromkeys(sizes)
        device = str(self.common.device)
        one = prefill.PrefillSetting(
            shape=self.shape, method=method, length=self.tokens(thousands), chunk=self.tokens(chunk), device=device, layers=layers,
            **sizes,
        )  # fmt: skip
        about = {"about": provenance(self.commit)}
        record = Record(asdict(one), prefill.measure(self.part[1], one, None) | about)
        record.measures["over_floor"] = room.over_floor(record)
        ResultsFile(self.out / "prefill.jsonl").add(record)
        noted(f"{one}: {record['indexed_s']} s")

    def kernels(self, what: str, *of: int) -> None:
        """Time kernels, each checked against its definition."""
        torch.manual_seed(time.time_ns() % (1 << 31))
        with torch.inference_mode():
            for name, line in self._kernels(what, *of):
                Report(self.out / f"{name}.jsonl", self.commit, **SHAPE)(line)

    def _kernels(self, what: str, *of: int) -> Iterator[tuple[str, dict[str, Any]]]:
        if what == "batches":
            batch, thousands = of
            tokens = str(self.tokens(thousands))
            each = kernels_batches.lines(quick=False, only_attention=False, batches=str(batch), lengths=tokens, most=1 << 21)
            yield from (("kernels_batches", line) for line in each)
        elif what == "rounds":
            yield from (("kernels_rounds", line) for line in kernels_rounds.lines(quick=False))
        else:
            about = {"method": "pariskv", "rows": kernels_pariskv.K}
            if what == "encode":
                yield "kernels_pariskv", about | kernels_pariskv.encode_time(self.tokens(128))
            else:
                for line in kernels_pariskv.Chain(1, self.tokens(128)).times(with_torch=False):
                    yield "kernels_pariskv", about | line


def job(text: str) -> tuple[int, str, tuple[Any, ...]]:
    """Read a job as --jobs has it: what is done, and with what."""
    what, *of = text.split()
    return 12, what, tuple(int(each) if each.isdigit() else each for each in of)


def main() -> None:
    """Do what there is time for."""
    begin = time.perf_counter()
    given = options(__doc__, out=Path, commit=str, seconds=270, shape="llama-3.1-8b", shrink=1, jobs="")
    timings = Timings(given.out, given.commit, given.shape, given.shrink)
    for needed, what, of in map(job, given.jobs.split(",")) if given.jobs else JOBS:
        left = given.seconds - (time.perf_counter() - begin)
        noted(f"{left:.0f} s left: {what} {', '.join(map(str, of))}{' is left out' if left < needed else ''}")
        if left >= needed:
            try:
                getattr(timings, what)(*of)
            except Exception:  # the others count
                traceback.print_exc()
            free()


if __name__ == "__main__":
    run_as_script(main)
