"""Steps recorded in several graphs, between which the host works: what that changes, here; that it is captured, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import streams as streams_module
from kvthaw.cache.index_api import Index, Selection
from kvthaw.cache.streams import SegmentedGraph
from kvthaw.errors import CacheError
from kvthaw.index.forest import TreeIndex
from kvthaw.methods import resolve
from stand_in import StandIn
from zoo import build, prompt, ragged

STEPS = 24


def steps(model: PreTrainedModel, cache: kvthaw.Cache, mask: Tensor) -> Tensor:
    logits = []
    with torch.no_grad():
        for t in range(STEPS):
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            ids = torch.full((len(mask), 1), 5 + t)
            cache.kv.before_step()  # of which nothing is recorded
            logits.append(model(ids, past_key_values=cache, attention_mask=mask).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("method", ["icecache-digest", "icecache-digest:reuse=3", "icecache-digest:unit=token"])
def test_a_choice_left_to_the_host_is_the_eager_one(method: str) -> None:
    """Of rows of several lengths, behind a dense layer, while tokens leave their rings; searches are one a layer that searches."""
    rows = ragged([130, 90, 121])
    llama = build("llama", num_hidden_layers=3)
    eager, recorded = (kvthaw.Cache(llama, method, budget=48, dense_layers=1) for _ in range(2))
    for cache in (eager, recorded):
        with torch.no_grad():
            llama(**rows, past_key_values=cache)
    expected = steps(llama, eager, rows["attention_mask"])
    now = StandIn()
    with recorded.kv.streams.records(now):
        found = steps(llama, recorded, rows["attention_mask"])
    assert torch.equal(found, expected)
    assert now.calls == STEPS * sum(layer.leader is None for layer in recorded.kv.offloaded)
    assert recorded.kv.streams.graph is None
    assert recorded.stats() == eager.stats()


class Kept(StandIn):
    """Keeps what the host is to do."""

    def host(self, call: Callable[[], None]) -> None:
        self.call = call
        call()


def test_what_a_replay_asks_is_answered_as_by_the_index_now(llama: PreTrainedModel) -> None:
    """Through the same tensors, with other numbers, after more tokens, with tables that grew, of another index."""
    cache, steps = kvthaw.Cache(llama, "icecache-digest", budget=48, dense_layers=0), Kept()
    with torch.no_grad():
        llama(prompt(2, 130), past_key_values=cache)
    layer = cache.kv.offloaded[0]
    group, heads = layer.retriever, layer.retriever.context
    query = torch.randn(2, heads.q_heads, heads.head_dim)
    with cache.kv.streams.records(steps):
        group.choose(query, 130)
    buffer = group.buffer(2)
    rows, counts, slots, *_ = buffer.parts(buffer.answer)
    for change in (
        lambda: buffer.query.mul_(-1),
        lambda: llama(prompt(2, 20), past_key_values=cache),
        lambda: group.residency.grow(1000),
        group.branch,
    ):
        with torch.no_grad():
            change()
        buffer.answer.zero_()
        steps.call()
        expected = group.index.select(buffer.query, group.rows)
        assert torch.equal(rows, expected.rows)
        assert torch.equal(counts, expected.counts)
        there = group.residency.slot_row.gather(2, slots.long())
        assert torch.equal(there[rows >= 0], rows[rows >= 0])


class Weighs(TreeIndex):
    prepare = Index.prepare

    def select(self, query: Tensor, budget: int) -> Selection:
        found = super().select(query, budget)
        return replace(found, log_weight=torch.zeros((*query.shape[:2], budget)))


def test_weights_made_on_the_host_are_not_dropped(llama: PreTrainedModel) -> None:
    """There is no place for them on a desk; eager steps take them."""
    cache = kvthaw.Cache(llama, replace(resolve("icecache-digest"), index=Weighs), budget=48)
    with torch.no_grad():
        llama(prompt(1, 90), past_key_values=cache)
        llama(prompt(1, 1), past_key_values=cache)
        with cache.kv.streams.records(StandIn()), pytest.raises(CacheError, match=r"Weighs weighs .* capture=False"):
            llama(prompt(1, 1), past_key_values=cache)


class Capture:
    """In the place of torch.cuda.graph: how often captures began and ended; one of them fails."""

    began, ended, bad_begin, bad_end = 0, 0, 0, 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> None:
        Capture.began += 1
        if Capture.began == Capture.bad_begin:
            raise RuntimeError("cannot begin")

    def __exit__(self, *error: object) -> None:
        Capture.ended += 1
        if Capture.ended == Capture.bad_end:
            raise RuntimeError("cannot end")


@pytest.mark.parametrize(
    ("bad_begin", "bad_end", "words", "ended"), [(2, 0, "cannot begin", 1), (0, 1, "cannot end", 1), (0, 0, "the model's", 2)]
)
def test_what_goes_wrong_with_a_capture_comes_up(
    bad_begin: int, bad_end: int, words: str, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has begun ends once; the stream of before is the current one again."""
    streams: list[str] = ["the model's"]

    @contextmanager
    def stream(one: str) -> Iterator[None]:
        before = streams[-1]
        streams.append(one)
        try:
            yield
        finally:
            streams.append(before)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    for name in ("CUDAGraph", "Event", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    mended = list[object]()
    monkeypatch.setattr(streams_module, "end_failed_capture", mended.append)
    for name, value in {"began": 0, "ended": 0, "bad_begin": bad_begin, "bad_end": bad_end}.items():
        monkeypatch.setattr(Capture, name, value)

    def record() -> None:
        with SegmentedGraph() as graph:
            graph.host(lambda: None)
            raise RuntimeError("the model's")

    with pytest.raises(RuntimeError, match=words):
        record()
    assert streams[-1] == "the model's"
    assert len(streams) == 3
    assert Capture.ended == ended
    assert len(mended) == bool(bad_end)


@pytest.mark.gpu
def test_graphs_and_the_host_take_turns() -> None:
    x, there = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    selection_buffer = torch.zeros(1000, pin_memory=True)
    turns: list[float] = []

    def count() -> None:
        turns.append(float(selection_buffer[0]))
        selection_buffer.add_(1)

    with SegmentedGraph() as graph:
        for _ in range(3):
            selection_buffer.copy_(x * 2, non_blocking=True)
            graph.host(count)
            there.copy_(selection_buffer, non_blocking=True)
            x.copy_(there + 1)
    assert not turns, "nothing is done while it is recorded"
    for start in (1.0, 10.0):
        x.fill_(start)
        turns.clear()
        graph.replay()
        assert turns == [2 * start, 4 * start + 4, 8 * start + 12]
        assert x.tolist() == [8 * start + 14] * 1000


@pytest.mark.gpu
def test_what_the_host_raises_comes_up() -> None:
    x = torch.zeros(1, device="cuda")

    def fail() -> None:
        raise ValueError("a query is not finite")

    with SegmentedGraph() as graph:
        x.add_(1)
        graph.host(fail)
        x.add_(10)
    for times in (1, 2):
        with pytest.raises(ValueError, match="not finite"):
            graph.replay()
        assert float(x) == times


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_torch_as_it_was() -> None:
    """Random numbers can be drawn, and memory that another stream read is used again."""
    x, side, size = torch.ones(4, device="cuda"), torch.cuda.Stream(), 64 << 20
    with pytest.raises(RuntimeError), SegmentedGraph():
        x.sum().item()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(4, device="cuda").isfinite().all()
    before = torch.cuda.memory_reserved()
    for _ in range(8):
        given = torch.zeros(size, dtype=torch.uint8, device="cuda")
        given.record_stream(side)
        del given
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + 2 * size


@pytest.mark.gpu
def test_gpu_a_captured_step_casts_its_weights(device: torch.device) -> None:
    """Autocast frees the weights that it cast before the capture."""
    product, x = torch.nn.Linear(1024, 1024, device=device), torch.randn(2, 1024, device=device)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = product(x)
        with SegmentedGraph() as graph:
            found = product(x)
    junk = [torch.full_like(product.weight, torch.nan, dtype=torch.bfloat16) for _ in range(8)]
    graph.replay()
    assert torch.equal(found, expected), len(junk)
