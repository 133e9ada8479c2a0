"""Searches that run beside the layer before: as early as that, of the same choices, and never while the index changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.retriever import HostRetriever
from kvthaw.cache.streams import Streams
from kvthaw.index.forest import TreeIndex
from zoo import build, prompt, ragged

IDS = prompt(2, 160)
SOON = 20.0  # seconds; nobody waits so long unless something is wrong


@pytest.fixture
def model() -> PreTrainedModel:
    """Of four layers, two of which are prefetched."""
    return build("llama", num_hidden_layers=4)


def cached(model: PreTrainedModel, tokens: int = 90, **options: Any) -> kvthaw.Cache:
    cache = kvthaw.Cache(model, "icecache-digest", **{"budget": 64, "dense_layers": 0, "prefetch": True, **options})
    step(model, cache, IDS[:, :tokens])
    return cache


def step(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **more).logits


class Slow:
    """A search of one layer that waits until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, layer: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        select = TreeIndex.select

        def wait(index: TreeIndex, query: Tensor, budget: int) -> Any:
            if index.context.layer == layer:
                self.begun.set()
                assert self.go.wait(SOON)
            return select(index, query, budget)

        patch.setattr(TreeIndex, "select", wait)


def searched(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each step that was searched for early, from now on: the layer, and of how many tokens."""
    found, search = [], HostRetriever.search

    def spy(group: HostRetriever, queries: Tensor) -> Any:
        found.append((group.context.layer, queries.shape[2]))
        return search(group, queries)

    patch.setattr(HostRetriever, "search", spy)
    return found


def test_the_search_begins_before_the_layer_before_is_done(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, attend, order = cached(model), OffloadedLayer.decode, []
    slow = Slow(monkeypatch, layer=2)

    def attending(layer: OffloadedLayer, *args: Any) -> Tensor:
        if layer.number == 1:
            assert slow.begun.wait(SOON), "layer 2's search has not begun"
        if layer.number == 2:
            slow.go.set()
        out = attend(layer, *args)
        order.append(layer.number)
        return out

    monkeypatch.setattr(OffloadedLayer, "decode", attending)
    step(model, cache, IDS[:, :1])
    assert order == [0, 1, 2, 3]


def plain(model: PreTrainedModel, cache: kvthaw.Cache) -> list[Tensor]:
    return [step(model, cache, IDS[:, t : t + 1]) for t in range(14)]


def several(model: PreTrainedModel, cache: kvthaw.Cache) -> list[Tensor]:
    return [step(model, cache, IDS[:, 5 * t : 5 * t + 5]) for t in range(8)]


def changed(model: PreTrainedModel, cache: kvthaw.Cache) -> list[Tensor]:
    """Cropped, continued densely, with sequences that change places, and copied."""
    out = []
    for t in range(0, 24, 3):
        out += [step(model, cache, IDS[:, t + i : t + i + 1]) for i in range(3)]
        if t % 5 == 0:
            cache.crop(-1 - t)
        if t % 7 == 0:
            out.append(step(model, cache, IDS[:, t : t + 20]))
        if t % 4 == 0:
            cache.reorder_cache(torch.tensor([1, 0]))
        if t % 11 == 0:
            cache = copy.deepcopy(cache)
    return out


@pytest.mark.parametrize(("script", "reuse"), [(plain, 1), (several, 1), (changed, 1), (several, 2)])
def test_choices_are_those_of_asking_late(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[PreTrainedModel, kvthaw.Cache], list[Tensor]],
    reuse: int,
) -> None:
    early = searched(monkeypatch)
    found = script(model, cached(model, reuse=reuse))
    assert {layer for layer, _ in early} == ({2, 3} if reuse == 1 else {2}), "anchors but the model's first two layers"
    begun = len(early)
    assert begun >= 8
    if script is several:
        assert {tokens for _, tokens in early} >= {5, 2}, "some rings are full in the middle of a step"
    with monkeypatch.context() as patch:
        patch.setattr(IndexUpdater, "undisturbed", lambda updater, tokens: 0)
        late = script(model, cached(model, reuse=reuse))
    assert len(early) == begun
    assert all(torch.equal(a, b) for a, b in zip(found, late, strict=True))
    if script is plain:
        own = script(model, cached(model, reuse=reuse, prefetch=False))
        assert not all(torch.equal(a, b) for a, b in zip(found, own, strict=True)), "prefetched queries are not the layers' own"


def test_rows_of_different_lengths(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged([150, 37, 91])

    def generate() -> Tensor:
        with kvthaw.attach(model, "icecache-digest", budget=64, prefetch=True):
            return model.generate(**batch, max_new_tokens=30, do_sample=False)

    early = searched(monkeypatch)
    found = generate()
    assert len(early) > 40
    monkeypatch.setattr(IndexUpdater, "undisturbed", lambda updater, tokens: 0)
    assert torch.equal(generate(), found)


def test_requests_that_join_and_leave(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve() -> list[list[int]]:
        batch = kvthaw.Batch(model, "icecache-digest", max_seqs=2, capacity=256, budget=64, prefetch=True)
        requests = [batch.join(IDS[0, :100], max_new_tokens=20), batch.join(IDS[1, :70], max_new_tokens=8)]
        while batch.requests:
            batch.step()
            if batch.free and len(requests) == 2:
                requests.append(batch.join(IDS[1, :130], max_new_tokens=30))
        return [request.tokens for request in requests]

    early = searched(monkeypatch)
    found = serve()
    assert len(early) > 40
    monkeypatch.setattr(IndexUpdater, "undisturbed", lambda updater, tokens: 0)
    assert serve() == found


def test_behind_a_dense_layer_the_first_is_prefetched(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    early = searched(monkeypatch)
    step(model, cached(model, dense_layers=2), IDS[:, :1])
    assert early == [(2, 1), (3, 1)]


def test_errors_in_the_search_come_up(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, select = cached(model), TreeIndex.select
    twin = copy.deepcopy(cache)

    def fail(index: TreeIndex, query: Tensor, budget: int) -> Any:
        if index.context.layer == 2:
            raise RuntimeError(f"the search on {threading.current_thread().name} broke")
        return select(index, query, budget)

    with monkeypatch.context() as patch:
        patch.setattr(TreeIndex, "select", fail)
        with pytest.raises(RuntimeError, match=r"the search on kvthaw-search_0 broke"):
            step(model, cache, IDS[:, :1])
    assert torch.equal(step(model, cache, IDS[:, :1]), step(model, twin, IDS[:, :1]))


def test_an_index_that_failed_is_not_searched(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, asked = cached(model), []
    layer = cache.kv.offloaded[2]
    assert layer.retriever is not None

    def fail() -> None:
        raise MemoryError("no room for more")

    monkeypatch.setattr(TreeIndex, "select", lambda *args: asked.append(args))
    layer.retriever.submit(None, fail, lambda: None)
    layer.updater.predict(torch.randn(2, 4, 1, 16))
    with pytest.raises(MemoryError, match="no room"):
        layer.retriever.choose(torch.randn(2, 4, 16), 50)
    assert not asked


@pytest.mark.parametrize("change", ["submit", "truncate", "reorder", "copy", "wait"])
def test_the_index_stays_as_it_is_under_a_search(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    cache = cached(model)
    group = cache.kv.offloaded[2].retriever
    assert group is not None
    slow = Slow(monkeypatch, layer=2)
    changes: dict[str, Callable[[], object]] = {
        "submit": lambda: group.submit(None, lambda: None, lambda: None),
        "truncate": lambda: group.truncate(0, 50),
        "reorder": lambda: group.reorder([1, 0]),
        "copy": lambda: copy.deepcopy(cache.kv),
        "wait": group.wait,
    }
    found = group.search(torch.randn(2, 4, 3, 16))
    assert slow.begun.wait(SOON)
    other = threading.Thread(target=changes[change])
    other.start()
    other.join(0.1)
    assert other.is_alive(), "it does not wait"
    slow.go.set()
    other.join(SOON)
    assert all(search.done() for search in found)


def test_what_is_not_asked_for_is_dropped(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks off in the layer before, and whatever comes instead."""
    cache = cached(model)
    expected = step(model, copy.deepcopy(cache), IDS[:, :30])
    layer = cache.kv.offloaded[2]
    slow = Slow(monkeypatch, layer=2)
    layer.updater.predict(torch.randn(2, 4, 3, 16))
    first, *others = layer.own.searches
    assert slow.begun.wait(SOON)
    threading.Timer(0.1, slow.go.set).start()
    assert torch.equal(step(model, cache, IDS[:, :30]), expected), "a dense continuation"
    assert layer.own.predicted is None
    assert first.done()
    assert others
    assert all(search.cancelled() for search in others)


def test_a_copy_predicts_nothing(model: PreTrainedModel) -> None:
    cache = cached(model)
    layer = cache.kv.offloaded[2]
    layer.updater.predict(torch.randn(2, 4, 3, 16))
    twin = copy.deepcopy(cache).kv.offloaded[2].own
    assert len(layer.own.searches) == 3
    assert twin.predicted is None
    assert twin.searches == []


def test_searches_do_not_wait_for_the_changes_of_other_layers() -> None:
    line, go = Streams(), threading.Event()

    def change() -> None:
        go.wait(SOON)

    other = line.submit(None, change)
    assert line.search(None, [], lambda: 7).result(SOON) == 7
    own = line.search(None, [other], lambda: 8)
    assert not own.done()
    go.set()
    assert own.result(SOON) == 8


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as asking late; the host does not wait for the prefetched query."""
    model, ids = build("llama", num_hidden_layers=4, head_dim=64).to("cuda"), IDS.cuda()
    early = searched(monkeypatch)

    def generate() -> Tensor:
        with kvthaw.attach(model, "icecache-digest", budget=64, prefetch=True):
            return model.generate(ids, max_new_tokens=60, do_sample=False)

    found = generate()
    assert len(early) > 60
    cache = kvthaw.Cache(model, "icecache-digest", budget=64, prefetch=True)
    step(model, cache, ids)
    cache.wait()
    layer, queries, done = cache.kv.offloaded[2], torch.randn(2, 4, 1, 64, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # half a second: a host that waited would find it over
    done.record()
    layer.updater.predict(queries)
    assert not layer.own.searches[0].done()
    assert not done.query()
    one = cache.kv.sequences.begin(1, dense=False)
    cache.kv.sequences.place(one, 0, ids.device)
    layer.retriever.choose(queries[:, :, 0], one.longest)
    assert done.query()
    monkeypatch.setattr(IndexUpdater, "undisturbed", lambda updater, tokens: 0)
    assert torch.equal(generate(), found)
