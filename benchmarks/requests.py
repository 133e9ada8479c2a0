"""Serve many random requests on a CPU, disturb them at random, and compare every token with that of the request alone.

`python -m benchmarks.requests --requests 10000`: tiny models, a method after the other. Requests come in bursts, with and without
seeds and penalties; some are cancelled while they wait, prefill or decode; forwards fail between layers; memory is short in the
middle of a step. A request that ends by itself has the tokens that it has alone, one that was cancelled or failed the first of
them; nothing waits for ever; architectures (--architecture, by commas) take turns at the methods; in the end no KV stays on the
host. Exits with 1 where that does not hold. A line is a method.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.script import options
from kvthaw import METHODS, Batch, HostMemoryError, Request, Sampling, Scheduler
from kvthaw.methods import resolve

CAPACITY, SEQS, PATIENCE = 160, 5, 4000
"""Tokens of a sequence, sequences of a batch, steps in which all must have ended."""


class InjectedError(RuntimeError):
    """What a forward raises that is made to fail."""


class Disturbance:
    """Lets a model's forwards fail, or lack memory, in one of its layers, as often as `rate` says."""

    def __init__(self, model: PreTrainedModel, rng: random.Random, rate: float) -> None:
        self.rng, self.rate, self.active, self.count = rng, rate, False, Counter[str]()
        self.hooks = [layer.register_forward_hook(self._fail) for layer in model.model.layers]

    def _fail(self, *_: Any) -> None:
        if self.active and self.rng.random() < self.rate:
            error: Exception = self.rng.choice((InjectedError("injected"), HostMemoryError("injected")))
            self.count[type(error).__name__] += 1
            raise error


def kinds_of(model: PreTrainedModel, rng: random.Random, count: int) -> list[tuple[Tensor, Sampling]]:
    """Random prompts and how to go on from each."""
    kinds = []
    for i in range(count):
        ids = torch.randint(1, model.config.vocab_size, (rng.choice((1, 9, 30, 60, 110)),))
        hot, new = rng.random() < 0.7, rng.randint(1, 24)
        penalty = rng.choice((1.0, 1.0, 1.3))
        kinds.append(
            (
                ids,
                Sampling(temperature=1.0 if hot else 0.0, seed=i, repetition_penalty=penalty, max_tokens=new, ignore_eos=True),
            )
        )
    return kinds


def batch_of(model: PreTrainedModel, method: str, seqs: int) -> Batch:
    """A batch of small budget and blocks, so that rings fill and blocks are many."""
    sizes: dict[str, Any] = {} if resolve(method).dense else {"budget": 32}
    return Batch(model, method, max_seqs=seqs, capacity=CAPACITY, prefill_chunk=48, block_size=16, **sizes)


def run(model: PreTrainedModel, method: str, count: int, seed: int, *, kinds: int = 24, rate: float = 0.004) -> dict[str, Any]:
    """Serve `count` requests of `kinds` different ones. Returns what happened; raises AssertionError where a request got others."""
    rng = random.Random(f"{seed} {method}")
    torch.manual_seed(seed)
    pool, alone = kinds_of(model, rng, kinds), []
    single = batch_of(model, method, 1)
    for ids, sampling in pool:
        request = single.join(ids, sampling=sampling)
        while not request.finished:
            single.step()
        alone.append(request.tokens)
    scheduler = Scheduler(batch_of(model, method, SEQS), step_tokens=24)
    disturbance = Disturbance(model, rng, rate)
    asked: dict[Request, int] = {}
    ended: Counter[str] = Counter()
    begin, steps, quiet, came = time.perf_counter(), 0, 0, 0
    disturbance.active = True
    while came < count or scheduler.busy:
        if came < count and rng.random() < 0.25:
            for _ in range(min(count - came, rng.randint(1, 6))):
                which = rng.randrange(kinds)
                request = scheduler.submit(pool[which][0], sampling=pool[which][1], priority=rng.choice((0, 0, 1)))
                asked[request], came = which, came + 1
        if scheduler.busy and rng.random() < 0.03:
            scheduler.cancel(rng.choice([*scheduler.waiting, *scheduler.batch.requests]))
        with suppress(InjectedError):
            scheduler.step()
        steps, quiet = steps + 1, quiet + 1 if came == count else 0
        assert quiet < PATIENCE, f"{method}, seed {seed}: {len(scheduler.waiting)} wait, {scheduler.batch.requests} are served"
        for request in [request for request in asked if request.finished]:
            which = asked.pop(request)
            own, name = alone[which], str(request.finished)
            assert request.tokens == own[: len(request.tokens)], f"{method}, seed {seed}: {request.tokens}, alone {own}"
            assert name in ("left", "error") or len(request.tokens) == len(own)
            assert name != "error" or isinstance(request.error, InjectedError | HostMemoryError), repr(request.error)
            ended[name] += 1
    disturbance.active = False
    for hook in disturbance.hooks:
        hook.remove()
    held = scheduler.batch.stats().kv_host_bytes
    assert held == 0, f"{method}: {held} bytes of KV stay on the host"
    found = {"method": method, "seed": seed, "requests": count, "steps": steps, "ended": dict(ended)}
    found |= {"failures": dict(disturbance.count), "preemptions": scheduler.preemptions}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def tiny(architecture: str) -> PreTrainedModel:
    """A model of two to four layers with random weights, in float64: products of other shapes round alike."""
    sys.path.insert(0, "tests")
    from zoo import build_exact  # the tests' models

    return build_exact(architecture, **({"num_hidden_layers": 2} if architecture == "llama" else {}))


def main() -> None:
    """Run the methods one after the other, each with its share of the requests."""
    given = options(__doc__, requests=10000, architecture="llama", methods=",".join(METHODS), seed=0)
    methods, architectures = given.methods.split(","), given.architecture.split(",")
    models = {name: tiny(name) for name in architectures}
    for i, method in enumerate(methods):
        share = given.requests * (i + 1) // len(methods) - given.requests * i // len(methods)
        name = architectures[i % len(architectures)]
        print(json.dumps({"architecture": name, **run(models[name], method, share, given.seed)}), flush=True)


if __name__ == "__main__":
    main()
