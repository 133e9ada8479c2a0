"""Requests that are preempted wait in host memory and go on elsewhere, with the tokens that they would have had, and no forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Batch, HostMemoryError, PrefixCache, Request, Sampling, Scheduler
from kvthaw.methods import resolve
from zoo import DISTINCT, build, build_exact, build_for, prompt

CAPACITY = 260
LONG, SHORT, NEW = 150, 40, 24
INTERVALS = {"prkv": ":interval=9", "snapkv-refreshed": ":refresh=7"}
"""So that what recent queries choose is chosen again a few times."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=3)


def batch_of(model: PreTrainedModel, method: str, seqs: int = 3, **how: Any) -> Batch:
    settings = {} if resolve(method).dense else {"budget": 64, "dense_layers": 1, "block_size": 16}
    return Batch(model, method, max_seqs=seqs, capacity=CAPACITY, **settings | how)


def options(new: int, seed: int = 3) -> dict[str, Any]:
    return {"sampling": Sampling(temperature=1.0, seed=seed, repetition_penalty=1.2, max_tokens=new, ignore_eos=True)}


def alone(model: PreTrainedModel, method: str, ids: torch.Tensor, new: int, **how: Any) -> list[int]:
    """Return the tokens of a request that is never preempted. Each is computed once for all tests."""
    key = model, method, tuple(ids.tolist()), new, repr(how)
    if key not in _ALONE:
        batch = batch_of(model, method, 1, **how)
        request = batch.join(ids, **options(new))
        while batch.requests:
            batch.step()
        _ALONE[key] = request.tokens
    return _ALONE[key]


_ALONE: dict[Any, list[int]] = {}


def forwards(model: PreTrainedModel) -> tuple[list[int], Any]:
    """Tokens of each forward from now on, and the hook that counts them."""
    found: list[int] = []
    return found, model.model.register_forward_hook(lambda module, given, out: found.append(out[0].shape[1]))


def preempt_and_go_on(model: PreTrainedModel, batch: Batch, ids: torch.Tensor, at: tuple[int, ...]) -> Request:
    """Preempt a request once it has so many tokens, time after time; others take its place, of other lengths, and go on."""
    request, others = batch.join(ids, **options(NEW)), [batch.join(prompt(1, SHORT)[0], **options(12, 1))]
    for tokens in at:
        while len(request.tokens) < tokens:
            batch.step()
        assert batch.preempt(request), "not kept"
        others.append(batch.join(prompt(1, SHORT + tokens)[0], **options(7, tokens)))
        while len(others[-1].tokens) < 3:
            batch.step()
        seen, hook = forwards(model)
        batch.join(request)
        batch.step()
        hook.remove()
        assert seen == [1], "more than a decode step"
    while batch.requests:
        batch.step()
    return request


@pytest.mark.parametrize("method", [name + INTERVALS.get(name, "") for name in DISTINCT])
def test_every_method_goes_on_with_its_tokens(method: str) -> None:
    """All layers are the method's. Layers of full attention come with three methods below."""
    model, ids, how = build_for(method), prompt(1, LONG, seed=5)[0], {} if method == "full" else {"dense_layers": 0}
    request = preempt_and_go_on(model, batch_of(model, method, **how), ids, (2, 13))
    assert request.tokens == alone(model, method, ids, NEW, **how)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("gemma3", "quest"), ("gemma3n", "pariskv"), ("gemma4", "icecache-digest"), ("llama4", "clusterkv"),
        ("gpt_oss", "prkv-plus"), ("qwen3_next", "quest"), ("qwen3_next", "icecache-digest"), ("qwen3_next", "full"),
    ],
)  # fmt: skip
def test_windows_and_states_go_on(architecture: str, method: str) -> None:
    """Layers that keep a ring or a state, and such as share another's keys."""
    other = build_exact(architecture)
    batch, ids = batch_of(other, method), prompt(1, LONG, seed=5)[0]
    request = preempt_and_go_on(other, batch, ids, (2, 11))
    assert request.tokens == alone(other, method, ids, NEW)


@pytest.mark.parametrize("how", [{}, {"kv_dtype": "fp8"}])
@pytest.mark.parametrize("method", ["clusterkv-plus", "pariskv-plus", "prkv"])
def test_blocks_move_to_the_host_and_back(model: PreTrainedModel, method: str, how: dict[str, Any]) -> None:
    batch, ids = batch_of(model, method, device_memory="8MiB", **how), prompt(1, LONG, seed=5)[0]
    request = batch.join(ids, **options(NEW))
    while len(request.tokens) < 12:
        batch.step()
    device, before = batch.stats().device_block_bytes, batch.stats().moved_bytes
    assert device > 0
    assert batch.preempt(request)
    assert batch.stats().device_block_bytes == batch.stats().kv_host_bytes == 0
    assert request.swapped is not None
    assert request.swapped.host_bytes() >= device
    batch.join(request)
    assert batch.stats().kv_host_bytes == 0
    assert batch.stats().moved_bytes - before == 2 * batch.stats().device_block_bytes > 0
    assert request.swapped is None
    while batch.requests:
        batch.step()
    assert request.tokens == alone(model, method, ids, NEW, device_memory="8MiB", **how)


@pytest.mark.parametrize("method", ["full", "pariskv-plus"])
def test_where_the_host_has_no_room_it_begins_again(
    model: PreTrainedModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers had copied by then is let go."""
    batch, ids = (
        batch_of(model, method, device_memory="8MiB") if method != "full" else batch_of(model, method),
        prompt(1, LONG)[0],
    )
    request = batch.join(ids, **options(NEW))
    while len(request.tokens) < 12:
        batch.step()
    memory, real = batch.cache.kv.streams.memory, batch.cache.kv.streams.memory.allocate

    def short(*given: Any, **how: Any) -> torch.Tensor:
        calls.append(given)
        if len(calls) > 2:
            raise HostMemoryError("short")
        return real(*given, **how)

    calls: list[Any] = []
    monkeypatch.setattr(memory, "allocate", short)
    assert not batch.preempt(request)
    monkeypatch.undo()
    assert request.swapped is None
    assert batch.stats().device_block_bytes == batch.stats().kv_host_bytes == 0
    batch.join(request)
    while batch.requests:
        batch.step()
    assert request.tokens == alone(model, method, ids, NEW)


def test_a_prompt_that_is_not_whole_begins_again(model: PreTrainedModel) -> None:
    batch, ids = batch_of(model, "quest"), prompt(1, LONG)[0]
    request = batch.join(ids, **options(NEW))
    batch.prefill(request, 64)
    assert not batch.preempt(request)
    assert request.prefilled == 0
    batch.join(request)
    while batch.requests:
        batch.step()
    assert request.tokens == alone(model, "quest", ids, NEW)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_what_cannot_come_back_begins_again(model: PreTrainedModel, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason and wherever it shows, here once the KV is there."""
    model = model if architecture == "llama" else build_exact(architecture)
    batch, ids = batch_of(model, "quest"), prompt(1, LONG)[0]
    request = batch.join(ids, **options(NEW))
    while len(request.tokens) < 12:
        batch.step()
    assert batch.preempt(request)

    def lost(*given: Any, **how: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("lost")

    at, name = (batch._steps.sampler, "join") if architecture == "llama" else (batch.cache.states, "load")
    monkeypatch.setattr(at, name, lost)
    batch.join(request)
    assert (request.swapped, request.prefilled, batch.decoding) == (None, 0, [])
    while batch.requests:
        batch.step()
    assert request.tokens == alone(model, "quest", ids, NEW)


def test_a_sequence_cannot_come_back_to_other_layers(model: PreTrainedModel) -> None:
    """Where the cache was reset meanwhile, or it is another batch's, the request begins again."""
    ids = prompt(1, LONG)[0]
    for other in (False, True):
        batch = batch_of(model, "quest")
        request = batch.join(ids, **options(NEW))
        while len(request.tokens) < 12:
            batch.step()
        assert batch.preempt(request)
        if other:
            batch = batch_of(model, "quest")
            batch.prefill(batch.join(ids, **options(2)))
        else:
            batch.cache.kv.reset()
            batch.cache.kv.open(3, CAPACITY)
        batch.join(request)
        assert request.fed == request.prefilled == 0
        while batch.requests:
            batch.step()
        assert request.tokens == alone(model, "quest", ids, NEW)


def test_what_a_prefix_cache_shares_stays_its_own(model: PreTrainedModel) -> None:
    prefixes, ids = PrefixCache(), prompt(1, LONG, seed=5)[0]
    batch = batch_of(model, "icecache-digest", prefix_cache=prefixes)
    first = batch.join(ids, **options(5))
    while batch.requests:
        batch.step()
    request = batch.join(ids, **options(NEW))
    while len(request.tokens) < 12:
        batch.step()
    assert request.cached_tokens > 0
    kept, owners = prefixes.kept_bytes, [block.owners for block in batch.cache.kv.offloaded[0].store.blocks(request.seq)]
    assert max(owners) > 1
    assert batch.preempt(request)
    batch.join(request)
    assert [block.owners for block in batch.cache.kv.offloaded[0].store.blocks(request.seq)] == owners
    while batch.requests:
        batch.step()
    assert request.tokens == alone(model, "icecache-digest", ids, NEW)
    assert request.tokens[:5] == first.tokens
    assert prefixes.kept_bytes == kept


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(model: PreTrainedModel) -> None:
    scheduler = Scheduler(batch_of(model, "quest", 1))
    low = scheduler.submit(prompt(1, LONG)[0], priority=1, **options(NEW))
    while len(low.tokens) < 12:
        scheduler.step()
    held = scheduler.batch.cache.kv.offloaded[0].store.blocks(low.seq)
    scheduler.submit(prompt(1, SHORT)[0], **options(3))
    scheduler.step()
    assert low.swapped is not None
    assert [block.owners for block in held] == [1] * len(held)
    scheduler.cancel(low)
    assert [block.owners for block in held] == [0] * len(held)
    while scheduler.busy:
        scheduler.step()


@pytest.mark.parametrize("method", ["full", "prkv-plus", "icecache-digest"])
def test_an_urgent_request_takes_the_place_of_another(model: PreTrainedModel, method: str) -> None:
    """The last of the least urgent that decode gives way, and goes on without the model; one as urgent waits its turn."""
    asked = [(prompt(1, LONG, seed=n)[0], NEW + n) for n in range(3)]
    scheduler = Scheduler(batch_of(model, method, 2))
    first, low = (
        scheduler.submit(ids, priority=priority, **options(new)) for (ids, new), priority in zip(asked, (0, 1), strict=False)
    )
    while len(low.tokens) < 12:
        scheduler.step()
    urgent = scheduler.submit(asked[2][0], **options(5))
    scheduler.step()
    assert scheduler.waiting == [low]
    assert urgent in scheduler.batch.requests
    assert first in scheduler.batch.requests
    while scheduler.busy:
        scheduler.step()
    assert (scheduler.preemptions, scheduler.resumed, scheduler.recomputed) == (1, 1, 0)
    assert [one.tokens for one in (first, low, urgent)] == [
        alone(model, method, ids, new) for (ids, _), new in zip(asked, (NEW, NEW + 1, 5), strict=True)
    ]


@pytest.mark.parametrize(
    ("error", "resumed", "recomputed"), [(HostMemoryError("short"), 0, 1), (torch.OutOfMemoryError("short"), 1, 0)]
)
def test_which_memory_is_short_decides(
    model: PreTrainedModel, error: Exception, resumed: int, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt(1, LONG, seed=n)[0], NEW) for n in range(2)]
    scheduler = Scheduler(batch_of(model, "quest", 2))
    requests = [scheduler.submit(ids, **options(new)) for ids, new in asked]
    while len(requests[1].tokens) < 12:
        scheduler.step()
    layer, real = scheduler.batch.cache.kv.layers[1], scheduler.batch.cache.kv.layers[1].decode

    def short(*given: Any) -> torch.Tensor:
        monkeypatch.setattr(layer, "decode", real)
        raise error

    monkeypatch.setattr(layer, "decode", short)
    scheduler.step()
    assert scheduler.waiting == [requests[1]]
    while scheduler.busy:
        scheduler.step()
    assert (scheduler.preemptions, scheduler.resumed, scheduler.recomputed) == (1, resumed, recomputed)
    assert [one.tokens for one in requests] == [alone(model, "quest", ids, new) for ids, new in asked]


def test_what_waits_on_the_host_gives_way_first(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a request that decodes loses its place, one that waits loses what it holds where memory is short."""
    scheduler = Scheduler(batch_of(model, "quest", 1))
    low = scheduler.submit(prompt(1, LONG)[0], priority=1, **options(NEW))
    while len(low.tokens) < 12:
        scheduler.step()
    urgent = scheduler.submit(prompt(1, LONG, seed=2)[0], **options(30))
    while len(urgent.tokens) < 5:
        scheduler.step()
    assert low.swapped is not None
    layer, real = scheduler.batch.cache.kv.layers[1], scheduler.batch.cache.kv.layers[1].decode

    def short(*given: Any) -> torch.Tensor:
        monkeypatch.setattr(layer, "decode", real)
        raise HostMemoryError("short")

    monkeypatch.setattr(layer, "decode", short)
    scheduler.step()
    assert low.swapped is None
    assert urgent in scheduler.decoding
    while scheduler.busy:
        scheduler.step()
    assert (scheduler.preemptions, scheduler.resumed, scheduler.recomputed) == (1, 0, 1)
    assert low.tokens == alone(model, "quest", prompt(1, LONG)[0], NEW)


@pytest.mark.parametrize("method", ["prkv:interval=9", "prkv-plus:interval=9", "h2o", "snapkv-refreshed:refresh=7"])
def test_a_step_that_failed_is_not_remembered(model: PreTrainedModel, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half way through it indexes were asked that remember queries. Others decode next: one has given its place back."""
    asked = [(prompt(1, LONG, seed=n)[0], NEW) for n in range(3)]
    scheduler = Scheduler(batch_of(model, method, 3), step_tokens=512)
    requests = [scheduler.submit(ids, **options(new)) for ids, new in asked]
    layer, calls = scheduler.batch.cache.kv.layers[2], [0]
    real = layer.decode

    def short(*given: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in (5, 16, 27, 38, 49) and len(scheduler.batch.requests) > 1:
            raise torch.OutOfMemoryError("short")
        return real(*given)

    monkeypatch.setattr(layer, "decode", short)
    while scheduler.busy:
        scheduler.step()
    assert scheduler.resumed == scheduler.preemptions > 1
    assert [one.tokens for one in requests] == [alone(model, method, ids, new) for ids, new in asked]


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [None, "64MiB"])
@pytest.mark.parametrize(
    "method", ["full", "pariskv-plus", "clusterkv-plus", "prkv", "prkv-plus", "snapkv-refreshed", "h2o", "quest"]
)
def test_captured_steps_go_on(method: str, memory: str | None) -> None:
    """In another place, without another capture; blocks come back from pinned memory."""
    llama, settings = build("llama", max_position_embeddings=4096).to("cuda"), {"budget": 128, "block_size": 64}
    settings |= {} if memory is None else {"device_memory": memory}
    ids = prompt(1, 700, seed=5)[0].cuda()
    found: list[list[int]] = []
    for times in (0, 3):
        batch = Batch(llama, method, max_seqs=2, capacity=1024, **({} if method == "full" else settings))
        request, other = batch.join(ids, max_new_tokens=90, stop=()), batch.join(ids[:300], max_new_tokens=200, stop=())
        for tokens in range(20, 20 + 20 * times, 20):
            while len(request.tokens) < tokens:
                batch.step()
            before = batch.stats().captures
            assert batch.preempt(request)
            batch.leave(other)
            other = batch.join(ids[: 200 + tokens], max_new_tokens=200, stop=())
            while len(other.tokens) < 5:
                batch.step()
            batch.join(request)
            while len(request.tokens) < tokens + 5:
                batch.step()
            assert batch.stats().captures <= before + 1  # of one sequence, at first
        while not request.finished:
            batch.step()
        found.append(request.tokens)
    assert found[0] == found[1]
