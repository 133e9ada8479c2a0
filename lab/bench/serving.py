"""A running batch that requests keep joining and leaving: time of a step, with what must be done between steps, and of a join."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvthaw.bench.decode import Watch
from kvthaw.engine.batch import Batch
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.request import Request
from kvthaw.engine.warm import warm
from kvthaw.errors import CacheError, ConfigError, at_least
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.method_names import AUTO
from kvthaw.methods import resolve
from lab.bench.card import provenance
from lab.bench.shapes import build, random_ids

_WARM = 8  # steps that do not count: two eager ones, the capture, and the first replays


class _Step(NamedTuple):
    """A step: seconds, requests that it gave a token, whether one had joined before it, and whether one ended with it."""

    took: float
    live: int
    joined: bool
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A serving benchmark.

    length: tokens of the longest prompt; the shortest has half of it.
    max_seqs: requests that are decoded together.
    requests: number of all requests.
    new_tokens: tokens that each request gets.
    budget, device_memory: as for `kvthaw.Cache`.
    """

    shape: str = "tiny"
    length: int = 2048
    max_seqs: int = 4
    requests: int = 8
    new_tokens: int = 64
    budget: int | float = 256
    device_memory: str | None = None

    def __post_init__(self) -> None:
        at_least(2, length=self.length, new_tokens=self.new_tokens)
        at_least(1, max_seqs=self.max_seqs, requests=self.requests)


def run(
    asked: Serving,
    methods: Sequence[str],
    known: ResultsFile,
    *,
    commit: str | None = None,
    say: Callable[[Record], None] = lambda record: None,
    watch: Watch = lambda what, done, of: None,
) -> list[Record]:
    """Serve the prompts with each method that is not known yet: every new_tokens / sequences steps one finishes and another joins.
    A small model first shows that a request gets the tokens that it gets alone."""
    (device, name), about = where(), provenance(commit)
    settings = {method: {"method": method, **asdict(asked), "device": name} for method in methods}
    missing = [method for method in methods if known.get(settings[method]) is None]
    for method in missing:
        watch(f"checking {method}", 0, len(missing))
        check(method, device)
    model = build(asked.shape, device) if missing else None
    for done, method in enumerate(missing):
        assert model is not None
        watch(method, done, len(missing))
        known.add(Record(settings[method], {**measure(model, method, asked), "about": about}))
        watch(method, done + 1, len(missing))
    found = [record for setting in settings.values() if (record := known.get(setting)) is not None]
    for record in found:
        say(record)
    return found


def check(method: str, device: torch.device) -> None:
    """Check that requests in a batch get the tokens that each gets in a batch alone. Raises CacheError if one does not."""
    model = build("tiny", device).float()
    prompts = [random_ids(model, 1, n, seed=i)[0] for i, n in enumerate((150, 60, 100))]
    found = []
    for seqs in (1, 2):
        batch = Batch(model, method, max_seqs=seqs, capacity=200, **_settings(method, 48, None))
        found.append([request.tokens for request in _serve(batch, prompts, 30, [], [])])
    if found[0] != found[1]:
        raise CacheError(f"{method}: a request in company gets other tokens than alone")


def measure(model: PreTrainedModel, method: str, asked: Serving) -> dict[str, Any]:
    """Return step times in ms, times of joins in s, and statistics of captures."""
    length, seqs, requests, new_tokens = asked.length, asked.max_seqs, asked.requests, asked.new_tokens
    prompts = [random_ids(model, 1, length - i * length // (2 * requests), seed=i)[0] for i in range(requests)]
    settings = _settings(method, asked.budget, asked.device_memory)
    batch = Batch(model, method, max_seqs=seqs, capacity=length + new_tokens, **settings)
    warm(batch)
    steps: list[_Step] = []
    joins: list[float] = []
    begin = time.perf_counter()
    _serve(batch, prompts, new_tokens, steps, joins)
    whole = time.perf_counter() - begin
    full, stats = [one for one in steps[_WARM:] if one.live == seqs], batch.stats()
    behind = [after for one, after in pairwise(steps[_WARM:]) if one.ended and after.live and not after.joined]
    times = sorted(1000 * one.took for one in full)
    if not times:
        raise ConfigError(
            f"requests is {requests} and new_tokens {new_tokens}; after {_WARM} steps none had all {seqs} places busy: serve more"
        )
    return {
        "steps": len(times),
        "step_ms_p50": statistics.median(times),
        "step_ms_mean": statistics.fmean(times),
        "step_ms_p95": times[int(0.95 * len(times))],
        "step_ms_max": times[-1],
        "step_ms_after_join": 1000 * statistics.median([one.took for one in full if one.joined] or [0.0]),
        "step_ms_with_end": 1000 * statistics.median([one.took for one in full if one.ended] or [0.0]),
        "step_ms_after_end": 1000 * statistics.median([one.took for one in behind] or [0.0]),
        "join_s_p50": statistics.median(joins),
        "tokens_per_s": requests * new_tokens / whole,
        "captures": stats.captures,
        "capture_s": stats.capture_seconds,
        "capture_bytes": stats.capture_bytes,
        "hit_rate": stats.hit_rate,
        "kv_device_bytes": stats.kv_device_bytes + stats.kv_dense_bytes,
    }


def _serve(batch: Batch, prompts: list[Tensor], new: int, steps: list[_Step], joins: list[float]) -> list[Request]:
    """Serve all prompts. The next one joins `new / sequences` steps after the last one, or as soon as a slot is free."""
    waiting, served, apart = list(prompts), list[Request](), max(1, new // batch.max_seqs)
    while waiting or batch.requests:
        joined = bool(waiting and batch.free and (not batch.requests or len(steps) % apart == 0))
        if joined:
            begin = time.perf_counter()
            served.append(batch.join(waiting.pop(0), max_new_tokens=new, stop=()))
            batch.prefill(served[-1], served[-1].prompt)
            batch.start(timeout=None)
            batch.read()
            joins.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        told = batch.step()  # its tokens come back to the host, so it is over then
        steps.append(_Step(time.perf_counter() - begin, len(told), joined, any(one.finished for one in told)))
    return served


def _settings(method: str, budget: int | float, memory: str | None) -> dict[str, Any]:
    return {} if method != AUTO and resolve(method).dense else {"budget": budget, "device_memory": memory}
