"""A server of a tiny model on a free port, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI
from transformers import PreTrainedModel

import bytemodel
from kvthaw import Batch, PrefixCache
from kvthaw.engine.library import Library
from kvthaw.serve.protocol import listen
from kvthaw.serve.server import Server
from kvthaw.serve.service import Service

SETTINGS: dict[str, Any] = {"method": "icecache", "budget": 64, "block_size": 64}
TEMPLATE = (  # refuses developers
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class Served:
    """A running server, and clients of it."""

    server: Server
    service: Service
    model: PreTrainedModel
    url: str
    openai: OpenAI
    http: httpx2.Client

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)


@contextmanager
def serving(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    max_seqs: int = 4,
    api_keys: tuple[str, ...] = (),
    hosts: tuple[str, ...] | None = None,
    grace: float = 0.0,
    kv_dir: Path | None = None,
    method: str = "icecache",
    budget: int | None = 64,
    block_size: int = 64,
    capacity: int = bytemodel.POSITIONS,
    name: str = "tiny",
    **how: Any,
) -> Iterator[Served]:
    batch = Batch(
        model,
        max_seqs=max_seqs,
        capacity=capacity,
        prefix_cache=PrefixCache(),
        **(SETTINGS | {"method": method, "budget": budget, "block_size": block_size}),
    )
    if kv_dir is not None:
        assert batch.prefix_cache is not None
        how["library"] = Library(batch.cache, batch.prefix_cache, kv_dir)
    service = Service(batch, tokenizer, name, **how)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(service, grace=grace, api_keys=api_keys, hosts=hosts)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        with (
            httpx2.Client(base_url=url, timeout=30) as http,
            OpenAI(base_url=f"{url}/v1", api_key=(*api_keys, "none")[0], max_retries=0, timeout=30) as openai,
        ):
            until(lambda: server.started)
            yield Served(server, service, model, url, openai, http)
    finally:
        server.should_exit = True
        thread.join()


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
