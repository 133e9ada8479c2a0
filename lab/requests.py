"""Serve many random requests, disturb them at random, and compare every token with that of the request alone.

`python -m lab.requests --requests 10000`: tiny models, a method after the other. Requests come in bursts, with and without
seeds and penalties; some are cancelled while they wait, prefill or decode; forwards fail between layers; memory of the host or of
the device is short in the middle of a step; urgent ones take the places of others, which go on later. Of "auto" a batch attends to
everything with KV in blocks, and from 60 tokens a request on by oracle, with a budget above every length. A request that ends by
itself has the tokens that it has alone, one that was cancelled or failed the first of them; nothing waits for ever; architectures
(--architecture, by commas) take turns at the methods; in the end no KV stays on the host, and a GPU (--device cuda) has as much
memory allocated as before. Exits with 1 where that does not hold. A line is a method.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvthaw import METHODS, Batch, HostMemoryError, Request, Sampling, Scheduler
from kvthaw.methods import resolve
from lab.script import options

CAPACITY, SEQS, PATIENCE = 160, 5, 4000
"""Tokens of a sequence, sequences of a batch, steps in which all must have ended."""


class InjectedError(RuntimeError):
    """What a forward raises that is made to fail."""


ERRORS = InjectedError, HostMemoryError, torch.OutOfMemoryError


class Disturbance:
    """Lets a model's forwards fail, or lack memory, in one of its layers, as often as `rate` says.

    seed: of its own generator, so that the number of a layer's call decides whether it fails, however long steps take.
    """

    def __init__(self, model: PreTrainedModel, seed: str, rate: float) -> None:
        self.rng, self.rate, self.active, self.count = random.Random(seed), rate, False, Counter[str]()
        self.hooks = [layer.register_forward_hook(self._fail) for layer in model.model.layers]

    def _fail(self, *_: Any) -> None:
        if self.active and self.rng.random() < self.rate:
            error = self.rng.choice(ERRORS)("injected")
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
    if method == "auto":
        own = model.config.get_text_config(decoder=True)
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        a_token = 2 * own.num_key_value_heads * head_dim * model.dtype.itemsize * own.num_hidden_layers
        method, sizes = "oracle", {"budget": CAPACITY, "full_below": 60, "device_memory": 760 * a_token}
    else:
        sizes = {} if resolve(method).dense else {"budget": 32, "device_memory": "256KiB"}
    return Batch(model, method, max_seqs=seqs, capacity=CAPACITY, prefill_chunk=48, block_size=16, **sizes)


def serve_alone(model: PreTrainedModel, method: str, pool: Sequence[tuple[Tensor, Sampling]]) -> list[list[int]]:
    """Return the tokens of requests that are served one after the other."""
    batch, requests = batch_of(model, method, 1), []
    for ids, sampling in pool:
        requests.append(batch.join(ids, sampling=sampling))
        while not requests[-1].finished:
            batch.step()
    return [request.tokens for request in requests]


def held_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return what torch has allocated on the model's GPU, and page-locked on the host."""
    gc.collect()
    if model.device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch._C._host_emptyCache()  # which first takes back what was freed before a copy of it had ended
    # active_bytes is wrong before torch 2.13: what a copy still read when it was freed is never subtracted
    return torch.cuda.memory_allocated(), torch.cuda.host_memory_stats()["allocated_bytes.current"]


def run(model: PreTrainedModel, method: str, count: int, seed: int, *, kinds: int = 24, rate: float = 0.004) -> dict[str, Any]:
    """Serve `count` requests of `kinds` different ones. Returns what happened; raises AssertionError where a request got others."""
    rng = random.Random(f"{seed} {method}")
    torch.manual_seed(seed)
    begin, pool = time.perf_counter(), kinds_of(model, rng, kinds)
    alone = serve_alone(model, method, pool)
    before = held_bytes(model)
    found = serve(model, method, count, pool, alone, rng, Disturbance(model, f"{seed} {method} failures", rate))
    kept = [after - earlier for earlier, after in zip(before, held_bytes(model), strict=True)]
    found |= {"kept_device_bytes": kept[0], "kept_host_bytes": kept[1], "seconds": round(time.perf_counter() - begin, 1)}
    return {"method": method, "seed": seed, "requests": count} | found


def serve(
    model: PreTrainedModel,
    method: str,
    count: int,
    pool: Sequence[tuple[Tensor, Sampling]],
    alone: Sequence[list[int]],
    rng: random.Random,
    disturbance: Disturbance,
) -> dict[str, Any]:
    """Serve requests drawn from a pool, disturb them, and compare each with its tokens alone."""
    scheduler = Scheduler(batch_of(model, method, SEQS), step_tokens=24)
    asked: dict[Request, int] = {}
    ended: Counter[str] = Counter()
    steps, quiet, came = 0, 0, 0
    disturbance.active = True
    while came < count or scheduler.busy:
        if came < count and rng.random() < 0.25:
            for _ in range(min(count - came, rng.randint(1, 6))):
                which = rng.randrange(len(pool))
                how: dict[str, Any] = {"priority": rng.choice((0, 0, 1)), "client": rng.choice("abc")}
                request = scheduler.submit(pool[which][0], sampling=pool[which][1], **how)
                asked[request], came = which, came + 1
        if scheduler.busy and rng.random() < 0.03:
            scheduler.cancel(rng.choice([*scheduler.waiting, *scheduler.batch.requests]))
        with suppress(InjectedError):
            scheduler.step()
        steps, quiet = steps + 1, quiet + 1 if came == count else 0
        assert quiet < PATIENCE, f"{method}: {len(scheduler.waiting)} wait, {scheduler.batch.requests} are served"
        for request in [request for request in asked if request.finished]:
            which = asked.pop(request)
            own, name = alone[which], str(request.finished)
            assert request.tokens == own[: len(request.tokens)], f"{method}: {request.tokens}, alone {own}"
            assert name in ("left", "error") or len(request.tokens) == len(own)
            assert name != "error" or isinstance(request.error, ERRORS), repr(request.error)
            ended[name] += 1
    disturbance.active = False
    for hook in disturbance.hooks:
        hook.remove()
    kept = scheduler.batch.stats().kv_host_bytes
    assert kept == 0, f"{method}: {kept} bytes of KV stay on the host"
    told = {name: getattr(scheduler, name) for name in ("preemptions", "resumed", "recomputed")}
    return {"steps": steps, "ended": dict(ended), "failures": dict(disturbance.count), **told}


def tiny(architecture: str, device: str = "cpu", **more: Any) -> PreTrainedModel:
    """A model of two to four layers with random weights, whose products of other shapes round alike: in float64, or on a GPU, whose
    kernels take fewer digits, in float32 with such linear layers. more: of its config."""
    sys.path.insert(0, "tests")
    from zoo import build, build_exact, multiply_in_float64  # the tests' models

    sizes: dict[str, Any] = ({"num_hidden_layers": 2} if architecture == "llama" else {}) | more
    if device == "cpu":
        return build_exact(architecture, **sizes)
    model = build(architecture, **sizes).to(device)
    multiply_in_float64(model)
    return model


def main() -> None:
    """Run the methods one after the other, each with its share of the requests."""
    given = options(__doc__, requests=10000, architecture="llama", methods=",".join([*METHODS, "auto"]), seed=0, device="cpu")
    methods, architectures = given.methods.split(","), given.architecture.split(",")
    failed = False
    models = {name: tiny(name, given.device) for name in architectures}
    for i, method in enumerate(methods):
        share = given.requests * (i + 1) // len(methods) - given.requests * i // len(methods)
        name = architectures[i % len(architectures)]
        try:
            line = run(models[name], method, share, given.seed)
        except Exception as error:  # the other methods are served all the same
            line = {"method": method, "seed": given.seed, "failed": "".join(traceback.format_exception(error))}
            models[name] = tiny(name, given.device)
        failed |= "failed" in line or bool(line["kept_device_bytes"] or line["kept_host_bytes"])
        print(json.dumps({"architecture": name, **line}), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
