"""A server whose model is split over two processes gives what a server of one process does."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from servers import SETTINGS, Served, serving, until
from transformers import AutoModelForCausalLM, AutoTokenizer

import bytemodel
from forked import forked
from kvthaw import Batch, PrefixCache, Scheduler
from kvthaw.engine.hf.tensor_parallel import ranks
from kvthaw.engine.lockstep import Lockstep
from lab.bench.shapes import split
from ranks import run

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="transformers splits a model over the GPUs where there are some"
)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 6


def answers(served: Served) -> list[Any]:
    """What requests get that come together, share a prompt, end at a string, follow a document, or come after one that left."""

    def ask(**body: Any) -> Any:
        choices = served.post("/v1/completions", **{"max_tokens": 12, "temperature": 0, "seed": 3} | body).json()["choices"]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    bodies: list[dict[str, Any]] = [
        {"prompt": TEXT, "n": 2, "temperature": 1.0},
        {"prompt": TEXT + "Of", "logprobs": 2},
        {"prompt": "Hi", "max_tokens": 40, "ignore_eos": True},
    ]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda body: ask(**body), bodies))
    text = found[2][0][0]
    found.append(ask(prompt="Hi", max_tokens=40, ignore_eos=True, stop=text[8:11]))
    with served.http.stream("POST", "/v1/completions", json={"prompt": TEXT, "stream": True, "ignore_eos": True}) as stream:
        next(stream.iter_lines())
    until(lambda: not served.service.worker.scheduler.busy)
    assert served.post("/v1/contexts", name="times", text=TEXT).status_code == 200
    found.append(ask(prompt="Of", context="times"))
    assert served.http.delete("/v1/contexts/times").status_code == 204
    person = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["age"]}
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": person, "strict": True}}
    found.append(ask(prompt=TEXT, response_format=named, max_tokens=60))
    assert 0 <= json.loads(found[-1][0][0])["age"] <= 150
    return [*found, ask(prompt=TEXT)]


def serve_or_follow(folder: str, rank: int) -> list[Any]:
    model = split(2, partial(AutoModelForCausalLM.from_pretrained, folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if rank == 0:
        with serving(model, tokenizer) as served:
            return answers(served)
    batch = Batch(model, max_seqs=4, capacity=bytemodel.POSITIONS, prefix_cache=PrefixCache(), **SETTINGS)
    Lockstep(ranks(model)).follow(Scheduler(batch), tokenizer)
    return []


def test_answers_of_two_processes_are_those_of_one(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with serving(*loaded) as served:
        alone = answers(served)
    both, _ = run(2, partial(serve_or_follow, loaded[0].config._name_or_path), tmp_path / "meeting")
    assert both == alone


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_the_command_starts_the_other_processes_and_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they run can be pickled, as spawned processes need it; forked ones import nothing again."""
    pytest.importorskip("accelerate", reason="transformers loads a split model with it")
    context = multiprocessing.get_context("fork")

    def process(target: Any, args: Any, daemon: bool) -> Any:
        work, given = pickle.loads(pickle.dumps((target, args)))
        return context.Process(target=work, args=given, daemon=daemon)

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=process))
    with forked("serve", str(bytemodel.save(tmp_path)), "--tp", "2", "--port", "0", "--budget", "64") as command:
        url = command.stderr.readline().split()[-1]
        said = httpx2.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 4}, timeout=30)
        assert said.json()["usage"]["completion_tokens"] >= 1
        command.send(signal.SIGTERM)
        assert command.wait() == 0
