"""Serve random requests that begin alike, with a prefix cache, and compare every token with that of the request alone.

`python -m lab.shared_prefixes --requests 1000`: a tiny model, batches of 24 requests under methods drawn at random. Prompts
are the first part of one of two documents and one of three questions; some requests are cancelled. Prefix caches are large, or so
small that they forget; blocks lie on the host, on the device, or on both. Many processes on one GPU (--device cuda) show what goes
wrong where the GPU is far behind its host: lab/gpu/prefixes.sh. Exits with 1 where a request got others.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvthaw import Batch, PrefixCache, Request, Scheduler
from lab.requests import tiny
from lab.script import options

CAPACITY, NEW, TOGETHER = 500, 8, 24
"""Tokens of a sequence, new ones of a request, requests of a batch."""
DEVICE_MEMORY = None, 300_000, 600_000, 1 << 30
"""Bytes; the second leaves room for a part of the blocks."""
HOST_BYTES = 200_000, 1 << 24
METHODS = "quest", "pariskv", "oracle", "clusterkv", "prkv", "icecache-digest"


def prompts_of(vocabulary: int) -> list[Tensor]:
    """Prompts that begin alike: 97 to 300 tokens of a document and 128 to 155 of a question."""
    rng = torch.Generator().manual_seed(0)
    documents, questions = (
        [torch.randint(1, vocabulary, (n,), generator=rng) for n in sizes] for sizes in ((300, 300), (128, 140, 155))
    )
    return [torch.cat((own[:cut], question)) for own in documents for cut in (300, 230, 97) for question in questions]


def batch_of(model: PreTrainedModel, method: str, seqs: int, prefix: PrefixCache | None, **more: Any) -> Batch:
    """A batch of small blocks, so that prompts share many and end within one."""
    how = {"dense_layers": 1, "block_size": 32, "budget": 96} | more
    return Batch(model, method, max_seqs=seqs, capacity=CAPACITY, prefix_cache=prefix, **how)


def run(model: PreTrainedModel, methods: Sequence[str], count: int, seed: int) -> dict[str, Any]:
    """Serve `count` requests. Returns how they ended, and how many tokens came from prefix caches; raises AssertionError where a
    request got others."""
    rng, prompts = random.Random(seed), prompts_of(model.config.vocab_size)
    ended, cached = Counter[str](), 0

    @functools.cache
    def alone(method: str, which: int) -> list[int]:
        batch = batch_of(model, method, 1, None, capture=False)
        request = batch.join(prompts[which], max_new_tokens=NEW, stop=())
        while not request.finished:
            batch.step()
        return request.tokens

    while ended.total() < count:
        method, memory, bytes_kept = rng.choice(methods), rng.choice(DEVICE_MEMORY), rng.choice(HOST_BYTES)
        batch = batch_of(model, method, rng.choice((2, 3, 4)), PrefixCache(host_bytes=bytes_kept), device_memory=memory)
        scheduler, some = Scheduler(batch, step_tokens=rng.choice((70, 150, 300))), rng.sample(range(len(prompts)), 6)
        asked = list[tuple[Request, int]]()
        for _ in range(min(TOGETHER, count - ended.total())):
            which = rng.choice(some)
            asked.append((scheduler.submit(prompts[which], max_new_tokens=NEW, stop=(), client=rng.choice("abc")), which))
            for _ in range(rng.choice((0, 0, 1, 3, 8))):
                scheduler.step()
            one, _ = rng.choice(asked)
            if not one.finished and rng.random() < 0.1:
                scheduler.cancel(one)
        while scheduler.busy:
            scheduler.step()
        for request, which in asked:
            own, name = alone(method, which)[: len(request.tokens)], str(request.finished)
            told = f"{method}, device_memory {memory}, {request.cached_tokens} tokens kept: {request.tokens}, alone {own}"
            assert request.tokens == own, told
            assert name in ("left", "length"), f"{told}; {name}: {request.error!r}"
            ended[name] += 1
        cached += batch.stats().cached_tokens
    return {"requests": count, "seed": seed, "ended": dict(ended), "cached_tokens": cached}


def main() -> None:
    """Serve requests, and tell what they came to."""
    given = options(__doc__, requests=1000, methods=",".join(METHODS), seed=0, device="cpu")
    model = tiny("llama", given.device, num_hidden_layers=3)
    try:
        line = run(model, given.methods.split(","), given.requests, given.seed)
    except AssertionError as error:
        line = {"seed": given.seed, "failed": str(error)}
    print(json.dumps(line), flush=True)
    sys.exit("failed" in line)


if __name__ == "__main__":
    main()
