"""Send many mixed requests over HTTP to a server of a tiny model on the CPU, and check that none is lost and all memory comes back.

`python -m lab.served --requests 10000`: in bursts come completions, chats and responses, streamed or whole, long prompts,
bodies that are no requests, more requests than may wait, and clients that leave in the middle. Each gets an answer of 200, 400 or
429, whole, or has left; in the end nothing runs or waits and no KV stays on the host but the prefix cache's. Exits with 1 where
that does not hold.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from lab.script import options

LENGTH = 400
"""The longest prompts, in tokens."""
AT_ONCE = 40


def request(rng: random.Random) -> tuple[str, Any]:
    """A path and a body, of which some are no requests."""
    text = "".join(rng.choices("abc def. ", k=rng.choice((1, 5, 20, 20, LENGTH))))
    common: dict[str, Any] = {"stream": rng.random() < 0.5, "temperature": rng.choice((0, 1)), "seed": rng.randrange(100)}
    new = rng.choice((1, 2, 4, 8))
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses")), rng.choice(
            ({}, [], 7, {"prompt": text, "messages": text, "input": 3}, {"prompt": "x" * 5000}, {"prompt": text, "n": 0})
        )
    if kind < 0.6:
        return "/v1/completions", common | {"prompt": text, "max_tokens": new, "n": rng.choice((1, 1, 1, 2))}
    if kind < 0.8:
        return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}], "max_tokens": new}
    if kind < 0.95:
        return "/v1/responses", common | {"input": text, "max_output_tokens": new}
    return "/v1/completions", common | {"prompt": text, "max_tokens": 1000, "ignore_eos": True}  # its client leaves


async def send(client: httpx2.AsyncClient, rng: random.Random) -> str:
    """Send a request; return what became of it."""
    path, body = request(rng)
    leaves = isinstance(body, dict) and (body.get("max_tokens") == 1000 or rng.random() < 0.08)
    try:
        async with asyncio.timeout(rng.choice((0.01, 0.1, 0.5)) if leaves else 120):
            said = await client.post(path, json=body)
    except TimeoutError:
        return "left" if leaves else "lost"
    if said.status_code != 200:
        return str(said.status_code) if "error" in said.json() else "lost"
    ended = "data: [DONE]", "event: response.completed", "event: response.incomplete"
    whole = any(end in said.text for end in ended) if body.get("stream") else bool(json.loads(said.text)["usage"])
    return "200" if whole else "lost"


async def run(served: Any, count: int, seed: int) -> Counter[str]:
    """Send all, in bursts."""
    rng, found, began = random.Random(seed), Counter[str](), time.monotonic()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=served.url, timeout=None, limits=limits) as client:
        while (sent := found.total()) < count:
            burst = min(count - sent, rng.choice((1, 4, AT_ONCE)))
            found.update(await asyncio.gather(*(send(client, rng) for _ in range(burst))))
            if sent // 500 != found.total() // 500:
                print(f"{time.monotonic() - began:.0f} s: {dict(found)}, {memory()} MiB", file=sys.stderr, flush=True)
    return found


def memory() -> int:
    """MiB of the process that are resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def main() -> None:
    asked = options(__doc__, requests=10000, seed=0)
    sys.path[:0] = ["tests", "tests/serve"]
    from servers import TEMPLATE, serving

    from bytemodel import save
    from kvthaw.engine.hf.model import load

    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(str(save(Path(folder))), dtype="float32")
        with serving(model, tokenizer, max_seqs=6, chat_template=TEMPLATE, max_waiting=24) as served:
            asyncio.run(run(served, 200, asked.seed + 1))  # what is allocated once
            before = memory()
            found = asyncio.run(run(served, asked.requests, asked.seed))
            scheduler = served.service.worker.scheduler
            end = time.monotonic() + 60
            while scheduler.busy and time.monotonic() < end:
                time.sleep(0.1)
            stats = served.service.batch.stats()
            result = {"answers": dict(found), "running": len(scheduler.batch.requests), "waiting": len(scheduler.waiting)}
            prefix = served.service.batch.prefix_cache
            result |= {
                "kv_host_bytes": stats.kv_host_bytes,
                "prefix_bytes": 0 if prefix is None else prefix.stats().kept_bytes,
                "mib_before": before,
                "mib_after": memory(),
            }
    print(json.dumps(result))
    lost = found["lost"] + sum(count for status, count in found.items() if status.startswith("5"))
    sys.exit(bool(lost or result["running"] or result["waiting"] or result["kv_host_bytes"]))


if __name__ == "__main__":
    main()
