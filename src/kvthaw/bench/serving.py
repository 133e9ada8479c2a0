"""A running batch that requests keep joining and leaving: time of a step, with what must be done between steps, and of a join."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.bench.card import emit, provenance
from kvthaw.bench.shapes import build
from kvthaw.engine.batch import Batch, Request
from kvthaw.errors import CacheError, ConfigError
from kvthaw.methods import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WARM = 8  # steps that do not count: two eager ones, the capture, and the first replays


def main(
    *,
    shape: str = "tiny",
    length: int = 4096,
    lanes: int = 4,
    requests: int = 8,
    new_tokens: int = 64,
    method: list[str] | None = None,
    budget: int = 256,
    compile: bool = False,
    out: Path | None = None,
    commit: str | None = None,
    json: bool = True,
) -> list[dict[str, Any]]:
    """Serve `requests` prompts of length / 2 to length tokens in `lanes` lanes, after checking on a small model that a request gets
    the tokens that it gets alone. Every new_tokens / lanes steps one finishes and another joins. One JSON line a method."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = method or ["full", "pariskv"]
    for name in names:
        check(name, device)
    model, lines = build(shape, device), []
    for name in names:
        line = {"bench": "serving", "shape": shape, "length": length, "lanes": lanes, "compile": compile, **provenance(commit)}
        line |= measure(model, name, length, lanes, requests, new_tokens, budget, compile)
        emit(line, out, quiet=not json)
        lines.append(line)
    return lines


def check(method: str, device: torch.device) -> None:
    """Requests that share a batch must get the tokens that each gets in a batch of its own. Raises CacheError where one does
    not."""
    model = build("tiny", device).float()
    prompts = [_prompt(model, n, i) for i, n in enumerate((150, 60, 100))]
    found = []
    for lanes in (1, 2):
        batch = Batch(model, method, lanes=lanes, capacity=200, **_settings(method, 48))
        found.append([request.tokens for request in _serve(batch, prompts, 30, [], [])])
    if found[0] != found[1]:
        raise CacheError(f"{method}: a request in company gets other tokens than alone")


def measure(
    model: PreTrainedModel, method: str, length: int, lanes: int, requests: int, new_tokens: int, budget: int, compile: bool
) -> dict[str, Any]:
    """Step times in ms, joins in s, and what was captured."""
    prompts = [_prompt(model, length - i * length // (2 * requests), i) for i in range(requests)]
    batch = Batch(model, method, lanes=lanes, capacity=length + new_tokens, compile=compile, **_settings(method, budget))
    steps: list[tuple[float, int]] = []
    joins: list[float] = []
    begin = time.perf_counter()
    _serve(batch, prompts, new_tokens, steps, joins)
    whole = time.perf_counter() - begin
    times, stats = sorted(1000 * took for took, live in steps[_WARM:] if live == lanes), batch.stats()
    if not times:
        raise ConfigError(
            f"requests is {requests} and new_tokens {new_tokens}; after {_WARM} steps none had all {lanes} lanes busy: serve more"
        )
    return {
        "method": method,
        "budget": None if resolve(method).dense else budget,
        "steps": len(times),
        "step_ms_p50": statistics.median(times),
        "step_ms_mean": statistics.fmean(times),
        "step_ms_p95": times[int(0.95 * len(times))],
        "step_ms_max": times[-1],
        "join_s_p50": statistics.median(joins),
        "tokens_per_s": requests * new_tokens / whole,
        "captures": stats.captures,
        "capture_s": stats.capture_seconds,
        "capture_bytes": stats.capture_bytes,
        "hit_rate": stats.hit_rate,
        "kv_device_bytes": stats.kv_device_bytes + stats.kv_dense_bytes,
    }


def _serve(batch: Batch, prompts: list[Tensor], new: int, steps: list[tuple[float, int]], joins: list[float]) -> list[Request]:
    """All prompts, the next joining new / lanes steps after the last one, or as soon as a lane is free."""
    waiting, served, apart = list(prompts), list[Request](), max(1, new // batch.lanes)
    while waiting or batch.requests:
        if waiting and batch.free and (not batch.requests or len(steps) % apart == 0):
            begin = time.perf_counter()
            served.append(batch.join(waiting.pop(0), max_new_tokens=new, stop=()))
            joins.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        live = len(batch.step())  # its tokens come back to the host, so it is over then
        steps.append((time.perf_counter() - begin, live))
    return served


def _settings(method: str, budget: int) -> dict[str, Any]:
    return {} if resolve(method).dense else {"budget": budget}


def _prompt(model: PreTrainedModel, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--method", default="full,pariskv,prkv,clusterkv")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="what the lines name as the commit")
    given = parser.parse_args()
    main(
        shape=given.shape, length=given.length, lanes=given.lanes, requests=given.requests, new_tokens=given.new_tokens,
        method=given.method.split(","), budget=given.budget, compile=given.compile, out=given.out, commit=given.commit,
    )  # fmt: skip
