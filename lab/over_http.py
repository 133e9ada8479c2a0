"""Replay requests of a trace over HTTP, and by the scheduler alone: what the server costs.

`python -m lab.over_http --trace AzureLLMInferenceTrace_conv.csv --out over_http.jsonl`: as `lab.trace`, on one batch
first by its scheduler, then streamed from a server of this process, whose client is a process of its own, then by the scheduler
again. The line says both and, in `over`, how many times as long the server took: in all, and to first tokens and between tokens by
their medians, beside the mean of the two runs without it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvthaw import Batch, Request, Scheduler
from kvthaw.engine.warm import frozen, warm
from kvthaw.evaluate.machine import where
from kvthaw.serve.protocol import listen
from kvthaw.serve.server import Server
from kvthaw.serve.service import Service
from lab.arrivals import Arrival, Served, arrivals, random_prompt, told
from lab.bench.shapes import build
from lab.joining import sizes_of
from lab.script import Report, options
from lab.trace import replay

COMPARED = ("seconds", "ttft_p50_s", "itl_p50_s")


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words."""
    words = models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


class Timed(Scheduler):
    """Counts the time within its steps, and the CPU time of their thread."""

    seconds = cpu_seconds = 0.0

    def step(self) -> list[Request]:
        begin, spent = time.perf_counter(), time.thread_time()
        try:
            return super().step()
        finally:
            self.seconds += time.perf_counter() - begin
            self.cpu_seconds += time.thread_time() - spent


def client(port: int, vocabulary: int, coming: list[Arrival]) -> tuple[list[Served], float]:
    """Send the requests as they come, greedy ones. Returns when their tokens came, and how long all took."""
    prompts = [random_prompt(vocabulary, one.prompt, seed).tolist() for seed, one in enumerate(coming)]
    common = {"temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [common | {"prompt": prompt, "max_tokens": one.new} for prompt, one in zip(prompts, coming, strict=True)]
    return asyncio.run(_client(port, [json.dumps(body).encode() for body in bodies], coming))


async def _client(port: int, bodies: list[bytes], coming: list[Arrival]) -> tuple[list[Served], float]:
    begin = time.perf_counter()

    async def send(body: bytes, one: Arrival) -> Served:
        await asyncio.sleep(begin + one.at - time.perf_counter())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        served, status = Served(one.at), await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {await reader.read(1000)!r}")
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b'data: {"id'):
                now, (choice,) = time.perf_counter() - begin, json.loads(line[6:])["choices"]
                served.tokens += [now] * len(choice["text"].split())  # an event may have several tokens, each of them a word
        writer.close()
        return served

    served = await asyncio.gather(*(send(body, one) for body, one in zip(bodies, coming, strict=True)))
    return served, time.perf_counter() - begin


@contextmanager
def serving(service: Service) -> Iterator[int]:
    """Serve meanwhile. Yields the port."""
    listener = listen("127.0.0.1", 0)
    server = Server(service, grace=0.0)
    thread = threading.Thread(target=server.run, args=([listener],), name="http")
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of the threads of a server that runs."""
    clocks = {thread.name: time.pthread_getcpuclockid(thread.ident or 0) for thread in threading.enumerate()}
    return {name: time.clock_gettime(clocks[name]) for name in ("http", "kvthaw-worker")}


def over_http(batch: Batch, coming: list[Arrival], clients: Executor) -> dict[str, Any]:
    """Serve the requests of a client. Returns what it measured."""
    service = Service(batch, tokenizer_of(batch.vocabulary), "random", max_waiting=len(coming))
    service.worker.scheduler = scheduler = Timed(batch)
    with serving(service) as port:
        before = cpu_seconds()
        served, whole = clients.submit(client, port, batch.vocabulary, coming).result()
        spent = {f"{name}_cpu_s": seconds - before[name] for name, seconds in cpu_seconds().items()}
    return told(coming, served, whole) | spent | within(scheduler)


def alone(batch: Batch, coming: list[Arrival]) -> dict[str, Any]:
    """Serve the requests by the scheduler alone. Returns what was measured."""
    scheduler = Timed(batch)
    return replay(scheduler, coming) | within(scheduler)


def within(scheduler: Timed) -> dict[str, float]:
    """Return the time within steps; the engine is idle, or busy with other things, for the rest."""
    return {"within_steps_s": scheduler.seconds, "within_steps_cpu_s": scheduler.cpu_seconds}


def main() -> None:
    """Measure, one JSON line."""
    given = options(
        __doc__, trace=Path, requests=100, speed=0.0, shape="llama-3.1-8b", layers=8, seqs=16, capacity=8192, budget=1024,
        host_memory=str, method="auto", commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    coming = arrivals(given.trace, given.requests, given.capacity, given.speed)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients:
        clients.submit(random_prompt, 1, 1, 0)  # imports what it needs meanwhile
        model = build(given.shape, device, layers=given.layers)
        sizes = sizes_of(given.method, given.budget, None, given.host_memory)
        batch = Batch(model, given.method, max_seqs=given.seqs, capacity=given.capacity, **sizes)
        warm(batch)
        few = [Arrival(0.0, min(600, one.prompt), min(100, one.new)) for one in coming[: given.seqs]]
        alone(batch, few)  # compiles kernels
        over_http(batch, few, clients)
        with frozen():
            before, found, after = alone(batch, coming), over_http(batch, coming, clients), alone(batch, coming)
    mean = {key: (before[key] + after[key]) / 2 for key in COMPARED}
    setting = {key: value for key, value in vars(given).items() if key not in ("out", "commit", "trace")}
    setting |= {"device": name, "trace": given.trace.name if given.trace else "drawn"}
    compared = {f"over_{key}": found[key] / mean[key] for key in COMPARED}
    Report(given.out, given.commit).record(setting, {**compared, "http": found, "alone": [before, after]})


if __name__ == "__main__":
    main()
