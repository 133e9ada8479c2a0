"""Measure what the HTTP server costs a token and a body, on a CPU, beside an engine that computes nothing.

`python -m lab.http_cost --streams 24 --out http_cost.jsonl`: the engine gives every request a token a step, of `host` ms of
small torch calls, as launches are, and `device` ms of waiting, as for a GPU. A client process reads the streams. The line says the
microseconds of CPU that both threads need for a token, how long a step takes with and without streams, and the milliseconds of CPU
that the event loop needs for a request whose prompt has so many token ids.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvthaw import Batch, Request, Scheduler
from kvthaw.serve.service import Service
from lab.arrivals import Arrival, rank
from lab.bench.shapes import build
from lab.over_http import client, cpu_seconds, serving, tokenizer_of
from lab.script import Report, options

PROMPTS = (8, 8192, 131072)
"""Token ids of the requests whose reading is timed."""


class Metronome(Scheduler):
    """Gives each request a token in every step. host, device: seconds of calls and of waiting."""

    def __init__(self, batch: Batch, host: float, device: float) -> None:
        super().__init__(batch)
        self.host, self.device = host, device
        self.requests: list[Request] = []
        self.steps: list[float] = []
        self._x = torch.zeros(16)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def decoding(self) -> list[Request]:
        return self.requests

    def submit(self, prompt: Any, **_: Any) -> Request:
        self.requests.append(prompt)
        return self.requests[-1]

    def cancel(self, request: Request) -> None:
        self.requests.remove(request)

    def step(self) -> list[Request]:
        begin, spent = time.perf_counter(), time.thread_time()
        while time.thread_time() - spent < self.host:
            self._x.add_(1)
        self.batch.launched()
        time.sleep(self.device)
        told = self.requests
        for request in told:
            request.take(len(request.tokens) + 1, None, len(request.tokens))
        self.requests = [request for request in told if request.finished is None]
        self.steps.append(time.perf_counter() - begin)
        return told


def streams(service: Service, engine: Metronome, clients: Executor, count: int, new: int) -> dict[str, Any]:
    """Serve streams. Returns microseconds of CPU by token, and milliseconds of steps."""
    engine.requests = [service.batch.request([1], max_new_tokens=new) for _ in range(count)]
    while engine.busy:
        engine.step()
    quiet, engine.steps = statistics.mean(engine.steps), []
    service.worker.scheduler = engine
    with serving(service) as port:
        clients.submit(client, port, service.batch.vocabulary, [Arrival(0.0, 8, 8)] * count).result()
        before, engine.steps = cpu_seconds(), []
        served, _ = clients.submit(client, port, service.batch.vocabulary, [Arrival(0.0, 8, new)] * count).result()
        after, steps = cpu_seconds(), engine.steps
        bodies = {}
        for tokens in PROMPTS:
            start = cpu_seconds()["http"]
            clients.submit(client, port, service.batch.vocabulary, [Arrival(0.0, tokens, 1)]).result()
            bodies[f"prompt_{tokens}_ms"] = 1e3 * (cpu_seconds()["http"] - start)
    spent = {name: seconds - before[name] for name, seconds in after.items()}
    gaps = [1e3 * (b - a) for one in served for a, b in zip(one.tokens, one.tokens[1:], strict=False)]
    engine_cpu = spent["kvthaw-worker"] - len(steps) * engine.host
    tokens = sum(len(one.tokens) for one in served)
    assert tokens == count * new, f"{tokens} tokens came"
    return {
        "http_us": 1e6 * spent["http"] / tokens,
        "engine_us": 1e6 * engine_cpu / tokens,
        "step_ms": 1e3 * statistics.mean(steps),
        "quiet_step_ms": 1e3 * quiet,
        "itl_p50_ms": rank(gaps, 50),
        "itl_p99_ms": rank(gaps, 99),
        **bodies,
    }


def main() -> None:
    """Measure, one JSON line."""
    given = options(__doc__, streams=24, tokens=300, host=2.0, device=6.0, commit=str, out=Path)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients:
        batch = Batch(build("tiny", torch.device("cpu"), layers=1), "full", max_seqs=given.streams, capacity=1 << 18)
        engine = Metronome(batch, given.host / 1e3, given.device / 1e3)
        service = Service(batch, tokenizer_of(batch.vocabulary), "random")
        found = streams(service, engine, clients, given.streams, given.tokens)
    setting = {key: value for key, value in vars(given).items() if key not in ("out", "commit")}
    Report(given.out, given.commit).record(setting, found)


if __name__ == "__main__":
    main()
