"""A model whose heads are split over processes generates what it does in one."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import split_program
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

import kvthaw
from kvthaw.cache import host_memory
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.engine.hf import fused, projections
from kvthaw.engine.hf.layer import TAG
from kvthaw.engine.hf.model import load_shipped
from kvthaw.engine.hf.tensor_parallel import LocalLinear, ranks
from kvthaw.engine.lockstep import Lockstep
from kvthaw.engine.request import Request, RequestSpec
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import CacheError, HostMemoryError, UnsupportedModelError
from kvthaw.evaluate.files import read_asset
from kvthaw.kernels import linear
from kvthaw.methods import METHODS
from lab.bench.shapes import build_part, split
from ranks import run
from zoo import VOCAB, build

OPTIONS = (
    "arkvale:policy=mean",
    "omnikv:dense=False",
    "prkv:share=auto:page=8",
    "shadowkv:rank=24",
    "magicpig:bits=3:tables=20",
)
FUSED = "icecache-digest", "arkvale"  # on a model whose queries, keys and values are one product
PROMPT, NEW = torch.randint(1, VOCAB, (1, 120), generator=torch.Generator().manual_seed(7)), 3

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers splits a model over the GPUs where there are some")


def small(size: int = 1, name: str = "llama") -> PreTrainedModel:
    """A model of 8 query heads and 4 KV heads, or those that the architecture has, whole or this process's part."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if name == "llama" else {}
    make = partial(build, name, num_hidden_layers=2, vocab_size=200, **heads)
    return make() if size == 1 else split(size, make)


def logits(model: PreTrainedModel, methods: Iterable[str], prompt: Tensor = PROMPT) -> dict[str, Any]:
    """The logits behind a prompt and the tokens that each method generates, [NEW, V]; as arrays, which go between processes."""
    found, how = {}, {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for method in methods:
        with kvthaw.attach(model, method, budget=48, seed=5):
            found[method] = torch.cat(model.generate(prompt, **how).logits).numpy()
    return found


def compare(split: dict[str, Any], alone: dict[str, Any]) -> None:
    assert split.keys() == alone.keys()
    for method, expected in alone.items():
        np.testing.assert_allclose(split[method], expected, atol=1e-4, rtol=1e-4, err_msg=method)
        assert (split[method].argmax(1) == expected.argmax(1)).all(), method


@on_cpu
@pytest.mark.parametrize(("name", "methods"), [("llama", OPTIONS), ("gpt_neox", FUSED)])
def test_a_method_chooses_in_two_processes_what_it_does_in_one(name: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    alone = logits(small(name=name), methods)
    for one in run(2, lambda rank: logits(small(2, name), methods), tmp_path / "meeting"):
        compare(one, alone)


class Rows(DynamicLayer):
    """A layer of several caches: all of them get the prompt, which is one row, and each gets a row of what comes after it."""

    flash4 = False

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers, self.given = layers, list[tuple[Tensor, Tensor]]()

    def get_seq_length(self) -> int:
        return int(self.layers[0].get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = key_states.view_as(key_states), value_states.view_as(value_states)
        self.given = list(zip(self._rows(key), self._rows(value), strict=True))
        setattr(key, TAG, self)
        setattr(value, TAG, self)
        return key, value

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, attention: AttentionParams) -> Tensor:
        found = [
            layer.attend(module, q, *layer.update(*kv), mask, attention)
            for layer, q, kv in zip(self.layers, self._rows(query), self.given, strict=True)
        ]
        return torch.cat(found[: len(query)])

    def _rows(self, x: Tensor) -> list[Tensor]:
        return list(x.expand(len(self.layers), -1, -1, -1).split(1))


@torch.no_grad()
def all_logits(model: PreTrainedModel, prompt: Tensor) -> dict[str, Any]:
    """As logits() for all methods, in forwards that they share: those of a split model mostly wait for the other processes."""
    caches = {name: kvthaw.Cache(model, name, budget=48, seed=5) for name in METHODS}
    apart = [
        name for name, cache in caches.items() if cache.settings.method.prefetches
    ]  # which ask the model beside its forward
    for name in apart:
        del caches[name]
    cache, ids, found = DynamicCache(), prompt, list[Tensor]()
    cache.layers = [Rows(layers) for layers in zip(*(one.layers for one in caches.values()), strict=True)]
    for _ in range(NEW):
        found.append(model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].expand(len(caches), -1))
        ids = found[-1].argmax(1, keepdim=True)
    kvthaw.detach(model)
    return dict(zip(caches, torch.stack(found, 1).numpy(), strict=True)) | logits(model, apart, prompt)


@on_cpu
def test_all_methods_choose_in_two_and_four_processes_what_they_do_in_one(tmp_path: Path) -> None:
    model, tokenizer = load_shipped()
    model.config.num_hidden_layers, model.model.layers = 3, model.model.layers[:3]  # each waits for the other processes
    prompt = tokenizer(read_asset("book.txt")[:600], return_tensors="pt").input_ids[:, :120]
    alone = all_logits(model, prompt)
    compare(alone | logits(model, ["pariskv"], prompt), alone)
    for size in (2, 4):

        def work(rank: int, size: int = size) -> dict[str, Any]:
            return all_logits(split(size, lambda: model), prompt)

        for one in run(size, work, tmp_path / f"meeting of {size}"):
            compare(one, alone)


def scheduled(model: PreTrainedModel) -> list[list[int]]:
    """What requests get, of which one is cancelled and one waits for a place."""
    scheduler = kvthaw.Scheduler(kvthaw.Batch(model, "clusterkv", max_seqs=2, capacity=160, budget=48), step_tokens=64)
    requests = [scheduler.submit(PROMPT[0, i:], max_new_tokens=6, stop=()) for i in (0, 30, 60, 70)]
    scheduler.step()
    scheduler.cancel(requests[1])
    while scheduler.busy:
        scheduler.step()
    return [request.tokens for request in requests]


def refused(rank: int) -> list[str]:
    """What two processes say of which the second has no host memory left, and what cannot be done with a split model."""
    model, said = small(2), []
    filled, cache = kvthaw.Cache(model, "full"), kvthaw.Cache(model, "pariskv", budget=48)
    with torch.no_grad():
        model(PROMPT, past_key_values=filled)
    if rank:
        host_memory.available_host_memory = lambda ranks: 0
    for error, call in (
        (HostMemoryError, lambda: model(PROMPT, past_key_values=cache)),
        (CacheError, lambda: filled.save("nowhere", PROMPT)),
        (
            UnsupportedModelError,
            lambda: kvthaw.attach(split(2, partial(build, "llama", num_key_value_heads=1, vocab_size=200)), "oracle"),
        ),
    ):
        with torch.no_grad(), pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))
    lockstep = Lockstep(ranks(model))
    lockstep.note(
        [Request(RequestSpec(PROMPT[0], 1, frozenset(), Sampling()), tokens=[rank])]
    )  # their steps gave different tokens
    with pytest.raises(CacheError) as caught:
        lockstep.receive() if rank else lockstep.send([])
    return [*said, str(caught.value)]


@on_cpu
def test_processes_decide_alike(tmp_path: Path) -> None:
    alone = scheduled(small())
    assert [len(tokens) for tokens in alone] == [6, 0, 6, 6]
    both = run(2, lambda rank: (scheduled(small(2)), refused(rank)), tmp_path / "meeting")
    assert [tokens for tokens, _ in both] == [alone, alone]
    (_, said), (_, other) = both
    assert said == other
    assert "2 processes" in said[1]
    assert "1 KV heads" in said[2]


def ways(rank: int) -> tuple[Any, int, int]:
    """The logits of steps by a model's forward and by joined launches. With it the number of joined launches, and the bytes of
    this process's weights."""
    config, joined = small().config, list[int]()
    model, found = build_part(2, config, torch.device("cpu"), torch.float32), []

    def counted(x: Tensor, weights: Sequence[Tensor], *given: Any, **how: Any) -> list[Tensor]:
        joined.append(len(weights))
        return linear.linear(x, weights, *given, **how)

    def together(**given: Any) -> Any:
        forwards = [(module, forward) for ref, forward in fused.find(model) if (module := ref()) is not None]
        with pytest.MonkeyPatch.context() as patch, fused.swapped(forwards):
            patch.setattr(projections, "linear", counted)
            return model.forward(**given)

    for forward in (model.forward, together):
        cache = kvthaw.Cache(model, "pariskv", budget=48)
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
        step = ElasticGraph(forward, cache, capture=False)
        found.append([step(torch.tensor([[5]]), torch.tensor([[len(PROMPT[0]) + i]])).numpy().copy() for i in range(2)])
    return np.array(found), len(joined), sum(weight.nbytes for weight in plain(model))


def test_the_forward_of_a_split_layer_is_not_copied() -> None:
    """It refers to processes, which cannot be copied."""
    processes: Any = threading.Lock()
    forward = LocalLinear(torch.ones(2, 2), None, processes)
    assert copy.deepcopy(forward) is forward


def plain(model: PreTrainedModel) -> list[torch.Tensor]:
    """What a process holds of a model's weights."""
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]


@on_cpu
def test_a_part_that_is_built_alone_joins_launches(tmp_path: Path) -> None:
    (one, launches, size), (other, *_) = run(2, ways, tmp_path / "meeting")
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(one[1], one[0], atol=1e-5)
    assert launches == 2 * 2 * 4  # steps, layers, products
    assert np.isfinite(one).all()
    assert one.std() > 0
    whole = small()
    shared = sum(weight.nbytes for name, weight in whole.named_parameters() if "norm" in name)
    assert size < 0.8 * (sum(weight.nbytes for weight in whole.parameters()) - shared)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_captured_steps_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    told, program = tmp_path / "told.json", Path(__file__).with_name("split_program.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), str(told)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(launch, check=True, timeout=400, env=environment)  # which ends
    assert json.loads(told.read_text()) == split_program.generated(split_program.make())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_a_server_starts_the_other_process_itself() -> None:
    given = [
        "serve",
        "shipped",
        "--tp",
        "2",
        "--port",
        "0",
        "--max-seqs",
        "2",
        "--max-len",
        "2048",
        "--budget",
        "256",
        "--grace",
        "5",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "kvthaw", *given], stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stderr is not None
            url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
            body = json.dumps({"prompt": "It was the best of times", "max_tokens": 8, "ignore_eos": True}).encode()
            asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as said:
                assert json.load(said)["usage"]["completion_tokens"] == 8
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
