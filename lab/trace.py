"""Replay requests of a trace: tokens a second, time to the first token and between tokens, under each method in one scheduler.

`python -m lab.trace --trace AzureLLMInferenceTrace_conv.csv --out trace.jsonl`: on some layers of the 8B shape the trace's
first requests come at their times, divided by --speed (0: all at once), with random prompts of their lengths, and get as many
tokens as they got. A trace is Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines (timestamp in ms,
input_length, output_length), also gzipped; without one, lengths and times are drawn. Requests that are longer than --capacity are
left out. --seqs: places, of each method or one number for all, separated by commas. A line is one method, whose tokens were first
compared, on a tiny model, with those of the requests alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kvthaw import Batch, Request, Scheduler
from kvthaw.engine.warm import frozen, warm
from kvthaw.evaluate.machine import where
from lab.arrivals import Arrival, Served, arrivals, random_prompt, rank, told
from lab.bench.shapes import build
from lab.joining import check, sizes_of
from lab.script import Report, options


def replay(scheduler: Scheduler, coming: list[Arrival], *, seeds: int = 0) -> dict[str, Any]:
    """Serve the requests as they come. Returns what was measured. seeds: the first prompt is drawn with this seed."""
    vocabulary = scheduler.batch.cache.model.config.vocab_size
    prompts = [random_prompt(vocabulary, one.prompt, seed) for seed, one in enumerate(coming, seeds)]
    served: dict[Request, Served] = {}
    asked, waiting, full = 0, 0, 0
    # Of each step: whether a prompt took part; its time, and until the device had the tokens
    launched, steps, tokens_in = 0.0, list[tuple[bool, float, float]](), list[int]()

    def note() -> None:
        nonlocal launched
        launched = time.perf_counter()

    scheduler.batch.launched = note
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    while asked < len(coming) or scheduler.busy:
        now = time.perf_counter() - begin
        while asked < len(coming) and coming[asked].at <= now:
            request = scheduler.submit(prompts[asked], max_new_tokens=coming[asked].new, stop=())
            served[request] = Served(coming[asked].at)
            asked += 1
        waiting = max(waiting, len(scheduler.waiting))
        if not scheduler.busy:
            time.sleep(max(0.0, coming[asked].at - now))
            continue
        start, prompts_left = time.perf_counter(), bool(scheduler.prefilling or (scheduler.waiting and scheduler.batch.free))
        before = sum(request.prefilled for request in served) if prompts_left else 0
        for request in scheduler.step():
            if request.error is not None:
                raise request.error
            served[request].tokens.append(time.perf_counter() - begin)
        steps.append((prompts_left, time.perf_counter() - start, max(0.0, launched - start)))
        tokens_in.append(sum(request.prefilled for request in served) - before if prompts_left else 0)
        kv = scheduler.batch.cache.kv
        full += kv.chooser.full or not kv.offloaded
    whole = time.perf_counter() - begin
    return {
        **told(coming, list(served.values()), whole),
        "most_waiting": waiting,
        "preemptions": scheduler.preemptions,
        "captures": scheduler.batch.stats().captures,
        "steps": len(steps),
        "full_steps": full,
        "allocated_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        **parted(steps),
        "longest": sorted(((took, new) for (_, took, _), new in zip(steps, tokens_in, strict=True)), reverse=True)[:12],
    }


def parted(steps: list[tuple[bool, float, float]]) -> dict[str, Any]:
    """Return the times of steps with a prompt and without, in all and of the median, and how long until the latter are launched."""
    found: dict[str, Any] = {}
    for name, own in (("prompt", [one for one in steps if one[0]]), ("plain", [one for one in steps if not one[0]])):
        times = [took for _, took, _ in own]
        found |= {f"{name}_steps": len(own), f"{name}_steps_s": sum(times), f"{name}_step_p50_s": rank(times, 50)}
    return found | {"plain_launched_p50_s": rank([launched for prompt, _, launched in steps if not prompt], 50)}


def main() -> None:
    """Check, then measure, one JSON line a method."""
    given = options(
        __doc__, trace=Path, requests=200, speed=1.0, shape="llama-3.1-8b", layers=8, seqs="16", capacity=16384, budget=1024,
        step_tokens=4096, device_memory=str, host_memory=str, method="full,auto", unchecked=False, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    methods = given.method.split(",")
    places = [int(n) for n in given.seqs.split(",")]
    places = places if len(places) == len(methods) else places[:1] * len(methods)
    checked = [None if given.unchecked else check(method, given.budget, device) for method in methods]
    coming = arrivals(given.trace, given.requests, given.capacity, given.speed)
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    for method, seqs, same in zip(methods, places, checked, strict=True):
        sizes = sizes_of(method, given.budget, given.device_memory, given.host_memory)
        scheduler = Scheduler(
            Batch(model, method, max_seqs=seqs, capacity=given.capacity, **sizes), step_tokens=given.step_tokens
        )
        warm(scheduler.batch)
        # Kernels are compiled, and cuBLAS chooses its own for each length: some 3 ms, which the first method alone would pay.
        replay(scheduler, [Arrival(0.0, one.prompt, 1) for one in coming])
        replay(scheduler, [Arrival(0.0, min(600, one.prompt), min(200, one.new)) for one in coming[:seqs]])
        setting = {
            key: value for key, value in vars(given).items() if key not in ("out", "commit", "method", "trace", "unchecked")
        }
        setting |= {"method": method, "seqs": seqs, "device": name, "trace": given.trace.name if given.trace else "drawn"}
        with frozen():
            found = replay(scheduler, coming)
        report.record(setting, {**found, "same_alone": same})
        scheduler.batch.cache.reset()
        del scheduler


if __name__ == "__main__":
    main()
