"""Time captured decode steps of two versions of kvthaw in turns, through the public API alone.

`python -m lab.versions BEFORE AFTER OUT [RUN ...]`: BEFORE and AFTER are folders that hold a version's package `kvthaw`.
Each version runs in a process of its own. No layer is dense, whatever number a version gives a method. For every method both take
the same prompt of random tokens, then the same random tokens in turns of `new_tokens` steps, so that what else changes on the
machine meets both. A step is timed from its call until the device is done, `host_median_ms` until it returns. A JSON line for each
method and version; turns_ms: the medians of its turns.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import kvthaw

SIZES: dict[str, dict[str, Any]] = {
    "full": {},
    "pariskv": {"retrieved": 100},
    "pariskv-plus": {"retrieved": 100},
    "thaw": {"retrieved": 100},
    "clusterkv-plus": {"budget": 1024},
    "prkv": {"budget": 1024},
}
WARM, TURNS = 24, 3
_LARGE = {"layers": 8, "hidden": 4096, "new_tokens": 48}
_METHODS = ("full", "pariskv-plus", "clusterkv-plus", "prkv", "thaw", "icecache-digest")
_BEFORE = {
    "icecache-digest": "icecache",
    "clusterkv-plus": "clusterkv",
    "pariskv-plus": "pariskv",
}
"""What methods were called in versions that have them under no other name."""
RUNS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "36k": ({**_LARGE, "length": 36864, "batch": 1}, _METHODS),
    "host": ({"layers": 30, "hidden": 512, "length": 1024, "batch": 24, "new_tokens": 96}, _METHODS[:4]),
    "eight": ({**_LARGE, "length": 16384, "batch": 8}, _METHODS[:4]),
    "128k": ({**_LARGE, "length": 131072, "batch": 1}, _METHODS[:5]),
    "kernels": ({**_LARGE, "length": 36864, "batch": 1}, _METHODS[2:4]),
}
"""Sizes and methods by name: one long sequence, 24 short ones for the host's time, a batch of eight; and kernels, which profiles
instead of timing steps, and is last since a profiler stays in its process."""


class Version:
    """A version in a process of its own, which answers one JSON line to each."""

    def __init__(self, folder: str) -> None:
        path = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, "-P", __file__, "--answer"]  # without this folder, whose names others have too
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes)  # type: ignore[call-overload]

    def ask(self, what: str, **how: Any) -> None:
        """Send a request, without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, how]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a version ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def both(versions: dict[str, Version], what: str, **how: Any) -> list[dict[str, Any]]:
    """Ask both at once, for what is not timed."""
    for version in versions.values():
        version.ask(what, **how)
    return [version.answer() for version in versions.values()]


def compare(before: str, after: str, out: Path, names: list[str]) -> None:
    """Measure every run that is named, or all."""
    versions = {"before": Version(before), "after": Version(after)}
    for name in names or RUNS:
        sizes, methods = RUNS[name]
        both(versions, "build", layers=sizes["layers"], hidden=sizes["hidden"])
        for method in methods:
            begun = both(versions, "begin", method=method, length=sizes["length"], batch=sizes["batch"])
            errors = {label: each["error"] for label, each in zip(versions, begun, strict=True) if "error" in each}
            turns: dict[str, list[dict[str, Any]]] = {label: [] for label in versions}
            for _ in range(0 if errors or name == "kernels" else TURNS):
                for label, version in versions.items():
                    version.ask("steps", count=sizes["new_tokens"])
                    turns[label].append(version.answer())
            known = both(versions, "kernels") if name == "kernels" and not errors else [{}, {}]
            ended = both(versions, "end")
            for (label, found), kernels, about in zip(turns.items(), known, ended, strict=True):
                line = {"setting": {"method": method, **sizes, "steps": "captured", "version": label}, **kernels}
                report(out, line | ({"error": errors} if errors else summary(found) if found else {}) | about)


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds a step over all turns."""
    whole = sorted(ms for turn in turns for ms in turn["whole"])
    host = sorted(ms for turn in turns for ms in turn["host"])
    return {
        "mean_ms": round(statistics.mean(whole), 3),
        "median_ms": round(statistics.median(whole), 3),
        "p95_ms": round(whole[int(0.95 * len(whole))], 3),
        "p99_ms": round(whole[int(0.99 * len(whole))], 3),
        "turns_ms": [round(statistics.median(turn["whole"]), 3) for turn in turns],
        "host_median_ms": round(statistics.median(host), 3),
        "captures": turns[-1]["captures"],
    }


def report(out: Path, line: dict[str, Any]) -> None:
    """Print a line and append it to the file."""
    print(json.dumps(line), flush=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Answers:
    """What a version does when it is asked."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape, self.length, self.at = (0, 0), 0, 0
        self.model: Any = None
        self.handle: Any = None
        self.tokens: Any = None
        self.attached = ExitStack()

    def build(self, layers: int, hidden: int) -> dict[str, Any]:
        """Have a Llama of random bf16 weights with 32 query and 8 KV heads of 128 dimensions."""
        if self.shape == (layers, hidden):
            return {}
        self.model, self.shape = None, (layers, hidden)
        self.free()
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
        with torch.device(self.device):
            self.model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        return {}

    def begin(self, method: str, length: int, batch: int) -> dict[str, Any]:
        """Attach a method, and take the prompt and the steps that compile and capture."""
        name = method if method in kvthaw.METHODS else _BEFORE.get(method, method)
        rng = torch.Generator(self.device).manual_seed(1)
        prompt, self.tokens = (torch.randint(0, 1024, (batch, n), device=self.device, generator=rng) for n in (length, 4096))
        sizes = SIZES[method] if method == "full" else {**SIZES.get(method, {"budget": 256}), "dense_layers": 0}
        self.handle = self.attached.enter_context(kvthaw.attach(self.model, name, **sizes))
        self.model(prompt, logits_to_keep=1)
        self.at, self.length = 0, length
        self.steps(WARM)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Take so many steps. Returns the milliseconds of each."""
        whole, host = [], []
        for _ in range(count):
            positions = torch.full((len(self.tokens), 1), self.length + self.at, device=self.device)
            ids, cache = self.tokens[:, self.at : self.at + 1], self.handle.cache
            self.rest()
            begin = time.perf_counter()
            self.model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
            host.append(1e3 * (time.perf_counter() - begin))
            self.rest()
            whole.append(1e3 * (time.perf_counter() - begin))
            self.at += 1
        return {"whole": whole, "host": host, "captures": self.handle.stats().captures}

    def kernels(self) -> dict[str, Any]:
        """Profile some steps. Returns of each kernel how often a step launches it and its microseconds a step."""
        count, times = 8, dict[str, list[float]]()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.steps(count)
        for event in seen.events() or ():
            if event.device_type.name == "CUDA":
                times.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:40]
        return {"kernels_us": {name: [len(us) / count, round(sum(us) / count, 2)] for name, us in longest}}

    def end(self) -> dict[str, Any]:
        """Detach. Returns the rows that came, and the machine."""
        about: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if self.device == "cuda" else None}
        about |= {"torch": torch.__version__, "transformers": transformers.__version__}
        if self.at:
            stats = self.handle.stats()
            about = {name: getattr(stats, name) for name in ("hit_rate", "retrieved", "fetched_bytes")} | about
        self.attached.close()
        self.handle, self.tokens, self.at = None, None, 0
        self.free()
        return about

    def rest(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what is held for nothing."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def answer(stdin: IO[str], stdout: IO[str]) -> None:
    """Answer requests until there are no more."""
    answers = Answers()
    with torch.no_grad():
        for line in stdin:
            what, how = json.loads(line)
            try:
                found = getattr(answers, what)(**how)
            except Exception as error:  # the other methods are still to be measured
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            stdout.write(json.dumps(found) + "\n")
            stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--answer"]:
        replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what else is printed is no answer
        answer(sys.stdin, replies)
    else:
        compare(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
