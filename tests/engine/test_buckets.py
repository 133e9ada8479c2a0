"""Steps are captured for buckets of lengths; tokens do not depend on which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvthaw
from kvthaw.cache import step as module
from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.sequences import Sequences
from kvthaw.engine.batch import Batch
from kvthaw.engine.graph_runner import StaticGraphs
from kvthaw.engine.request import Request
from kvthaw.engine.warm import warm
from machines import InjectedError, failing
from stand_in import StandIn, captured_by
from zoo import DISTINCT, build, build_exact, build_for, prompt

LENGTHS, NEW = [28, 120, 50], [6, 10, 4]
CAPACITY = 200


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 32, 128 and CAPACITY tokens."""
    monkeypatch.setattr(module, "LEAST", 32)


def serve(batch: Batch, prompts: list[torch.Tensor], new: list[int]) -> list[list[int]]:
    """Tokens of requests, of which the next joins every ten steps."""
    requests, waiting = list[Request](), list(zip(prompts, new, strict=True))
    while waiting or batch.requests:
        if waiting and batch.free:
            ids, most = waiting.pop(0)
            requests.append(batch.join(ids, max_new_tokens=most, stop=()))
        for _ in range(10):
            batch.step()
    return [request.tokens for request in requests]


def alone(model: Any, method: str, ids: torch.Tensor, new: int, **settings: Any) -> list[int]:
    with kvthaw.attach(model, method, **settings):
        return model.generate(ids[None], max_new_tokens=new, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()


def test_the_smallest_bucket_that_holds_the_next_token() -> None:
    assert module.buckets(131072) == [2048, 8192, 32768, 131072]
    assert module.buckets(10000) == [2048, 8192, 10000]
    assert module.buckets(100) == [100]
    sequences = Sequences()
    sequences.open(3, 10000)
    for lengths, count, size in (
        ((0, 0, 0), 3, 2048),
        ((2047, 5, 0), 2, 2048),
        ((2048, 5, 0), 2, 8192),
        ((5, 9000, 0), 2, 10000),
        ((5, 9000, 0), 1, 2048),
    ):
        for seq, length in enumerate(lengths):
            sequences.set_length(seq, length)
        assert sequences.bucket(count) == size
    sequences.paused |= {1}
    assert sequences.bucket(2) == 10000, "kernels look at what a paused sequence has, too"
    sequences.planned = 3000
    assert sequences.bucket(1) == 8192
    assert Sequences(left_pad=[0], padded_length=9).bucket(1) == 0, "where capacity grows, captures follow it"


@pytest.mark.parametrize("method", DISTINCT)
def test_tokens_do_not_depend_on_the_bucket(method: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes look at as much of their tables as on a GPU."""
    model, some = build_exact("llama", num_hidden_layers=2), {"budget": 32, "dense_layers": 0, "block_size": 16}
    settings: dict[str, Any] = {"dense_layers": 1} if method == "full" else some
    prompts, seen, looked_at = [prompt(1, n, seed=n)[0] for n in LENGTHS], set[int](), IndexContext.looked_at
    expected = [alone(model, method, ids, new, **settings) for ids, new in zip(prompts, NEW, strict=True)]

    def as_on_a_gpu(context: IndexContext, counts: Any, room: int, *most: Any) -> int:
        found = looked_at(replace(context, device=torch.device("meta")), counts, room, *most)
        seen.add(found)
        return max(found, 1)

    monkeypatch.setattr(IndexContext, "looked_at", as_on_a_gpu)
    batch = Batch(model, method, max_seqs=2, capacity=CAPACITY, **settings)
    assert serve(batch, prompts, NEW) == expected
    assert not seen or len(seen) > 2, "each bucket had its turn"


@pytest.mark.parametrize(("method", "kinds"), [("quest", [1, 3, 4]), ("full", [1, 2, 2]), ("icecache-digest", [1, 2, 2])])
def test_each_bucket_has_a_capture(method: str, kinds: list[int], small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made when it is first needed, and kept: of one sequence and of two, in buckets where the device selects."""
    captured_by(monkeypatch, StandIn)
    settings: dict[str, Any] = {"dense_layers": 1} if method == "full" else {"budget": 32, "dense_layers": 0}
    batch = Batch(build("llama", num_hidden_layers=2), method, max_seqs=2, capacity=CAPACITY, **settings)
    runner = batch.cache.replay = StaticGraphs(batch.model.forward, batch.cache)
    found = []
    for lengths, new in (([20], 10), ([20, 100], 60), ([20], 60)):  # 32; 32, 128 and 200; 32 and 128 tokens
        serve(batch, [prompt(1, n)[0] for n in lengths], [new] * len(lengths))
        found.append(runner.captures)
    assert found == kinds
    serve(batch, [prompt(1, n)[0] for n in (20, 100)], [60, 60])
    assert runner.captures == kinds[-1], "none is made again"


@pytest.mark.parametrize("method", [name for name in DISTINCT if name != "infinigen"])
def test_a_model_that_cannot_be_captured_decodes_eagerly(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in float32 copy sizes to the host, which ends a capture between two layers."""
    model = build_for(method)
    settings: dict[str, Any] = {"dense_layers": 1} if method == "full" else {"budget": 32, "dense_layers": 0, "block_size": 16}
    prompts = [prompt(1, n, seed=n)[0] for n in (40, 90)]
    expected = serve(Batch(model, method, max_seqs=2, capacity=CAPACITY, **settings), prompts, [5, 7])

    class UnderWay(StandIn):
        now = tried = 0

        def __enter__(self) -> StandIn:
            UnderWay.now = 1
            UnderWay.tried += 1
            return self

        def __exit__(self, *error: object) -> None:
            UnderWay.now = 0

    norm = model.model.layers[1].post_attention_layernorm
    plain = norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if UnderWay.now:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return plain(x)

    monkeypatch.setattr(norm, "forward", forward)
    captured_by(monkeypatch, UnderWay)
    batch = Batch(model, method, max_seqs=2, capacity=CAPACITY, **settings)
    runner = batch.cache.replay = StaticGraphs(batch.model.forward, batch.cache)
    assert serve(batch, prompts, [5, 7]) == expected
    assert UnderWay.tried == 1
    assert runner.captures == 0


def test_a_bucket_holds_what_indexes_have_not_dropped_yet(small: None) -> None:
    """Layers drop a request that has ended behind coming steps; kernels of the next one still see its length."""
    batch = Batch(
        build_exact("llama", num_hidden_layers=2), "pariskv", max_seqs=2, capacity=CAPACITY, budget=32, dense_layers=0
    )
    long, short = (batch.join(prompt(1, n)[0], max_new_tokens=new, stop=()) for n, new in ((100, 3), (8, 12)))
    kv, kept = batch.cache.kv, 0
    while not short.finished:
        batch.step()
        held = max(max(layer.retriever.index.counts) for layer in kv.offloaded if layer.retriever is not None)
        assert kv.sequences.bucket(2) >= held
        kept += bool(long.finished) and held > 32
    assert kept, "the case did not come"
    kv.finish_clear()
    assert kv.sequences.bucket(2) == 32


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_failure_of_the_model_is_raised_and_does_not_end_captures(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without a message, at the step that is captured, which is among these."""
    captured_by(monkeypatch, StandIn)
    model, ids = build_exact("llama", num_hidden_layers=2), prompt(1, 40)[0]
    settings: dict[str, Any] = {"budget": 32, "dense_layers": 0}
    expected = alone(model, "oracle", ids, 20, **settings)
    batch = Batch(model, "oracle", max_seqs=1, capacity=CAPACITY, **settings)
    runner = batch.cache.replay = StaticGraphs(batch.model.forward, batch.cache)
    request = batch.join(ids, max_new_tokens=20, stop=())
    batch.prefill(request)
    for _ in range(steps):
        batch.decode()
    if runner.captures:  # a replay runs no Python of the model
        return
    had, hook = list(request.tokens), failing(model, at=7)
    with pytest.raises(InjectedError):
        batch.decode()
    hook.remove()
    assert request.tokens == had
    while not runner.captures:
        batch.decode()
    assert request.tokens == expected[: len(request.tokens)]
    assert runner.capture


def test_a_capture_is_of_the_bucket_that_it_is_kept_for(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the smaller one that is enough once layers have dropped a long request, which a capture waits for."""
    made = list[tuple[int, int]]()

    class Noted(StandIn):
        def __enter__(self) -> StandIn:
            made.append((batch.cache.kv.sequences.bucket(2), runner._kind[1]))
            return self

    captured_by(monkeypatch, Noted)
    batch = Batch(build("llama", num_hidden_layers=2), "pariskv", max_seqs=2, capacity=CAPACITY, budget=32, dense_layers=0)
    runner = batch.cache.replay = StaticGraphs(batch.model.forward, batch.cache)
    first, short = (batch.join(prompt(1, 8)[0], max_new_tokens=new, stop=()) for new in (1, 20))
    for request in (first, short):
        batch.prefill(request)
    batch.read()
    for _ in range(4):
        batch.prefill(batch.join(prompt(1, 100)[0], max_new_tokens=1, stop=()))
        assert batch.read()
        batch.step()
    while not short.finished:
        batch.step()
    assert made
    assert all(size == kept for size, kept in made)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method", [*(name for name in DISTINCT if name != "infinigen"), "pariskv-plus", "clusterkv-plus", "prkv-plus"]
)
def test_captured_steps_move_from_bucket_to_bucket(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To longer ones as sequences grow and others join, and back when these leave; the second time by captures that are there."""
    monkeypatch.setattr(module, "LEAST", 512)
    model = build("llama", max_position_embeddings=8192).to("cuda")
    settings: dict[str, Any] = {} if method == "full" else {"budget": 128, "block_size": 64}
    prompts, new = [prompt(1, n, seed=n)[0].cuda() for n in (490, 2030, 90)], [40, 40, 30]
    expected = [alone(model, method, ids, n, capture=False, **settings) for ids, n in zip(prompts, new, strict=True)]
    batch = Batch(model, method, max_seqs=2, capacity=5000, **settings)
    assert serve(batch, prompts, new) == expected
    captures = batch.stats().captures
    assert captures <= 6
    assert serve(batch, prompts, new) == expected
    assert batch.stats().captures == captures, "each is kept"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "pariskv-plus", "clusterkv-plus"])
def test_a_warm_batch_captures_nothing_more(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 512)
    model = build("llama", max_position_embeddings=8192).to("cuda")
    settings: dict[str, Any] = {} if method == "full" else {"budget": 128, "block_size": 64}
    batch = Batch(model, method, max_seqs=2, capacity=5000, **settings)
    warm(batch)
    captures = batch.stats().captures
    assert captures == (2 if method == "full" else 6)
    serve(batch, [prompt(1, n, seed=n)[0].cuda() for n in (490, 2030, 90)], [40, 40, 30])
    assert batch.stats().captures == captures
