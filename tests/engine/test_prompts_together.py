"""Whole prompts of several requests in one forward: each request gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_architectures import COMMON
from transformers import PreTrainedModel

from kvthaw import Batch, PrefixCache, Request, Sampling, Scheduler
from kvthaw.cache.kv_cache import KVCache
from kvthaw.engine.slots import Slots
from kvthaw.errors import CacheError
from kvthaw.methods import METHODS
from zoo import KINDS, MODELS, build_exact, build_for, prompt

LENGTHS = (33, 9, 61, 80, 17)
NEW = 8
SIZES: dict[str, Any] = {"max_seqs": 6, "capacity": 160, "block_size": 16}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=3)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each step that takes prompts."""
    found, begin = list[int](), KVCache._begin

    def noted(kv: KVCache, *given: Any) -> Any:
        step = begin(kv, *given)
        if step.parts:
            found.append(len(step.parts))
        return step

    monkeypatch.setattr(KVCache, "_begin", noted)
    return found


def served(batch: Batch, ids: list[torch.Tensor], step_tokens: int, new: int = NEW, **how: Any) -> list[list[int]]:
    """Return the `new` tokens of each request; the requests come at once."""
    scheduler = Scheduler(batch, step_tokens=step_tokens)
    requests = [scheduler.submit(each, max_new_tokens=new, stop=(), **how) for each in ids]
    while scheduler.busy:
        scheduler.step()
    assert not any(request.error for request in requests)
    return [request.tokens for request in requests]


def alone(model: PreTrainedModel, method: str, ids: list[torch.Tensor], new: int = NEW, **sizes: Any) -> list[list[int]]:
    batch = Batch(model, method, **SIZES | sizes)
    return [served(batch, [each], 1000, new)[0] for each in ids]


@pytest.mark.parametrize("method", KINDS)
def test_every_method_keeps_the_prompts_apart(parts: list[int], method: str) -> None:
    model = build_for(method)
    ids = [prompt(1, n, seed=n)[0] for n in LENGTHS]
    sizes: dict[str, Any] = {"dense_layers": 1} | ({} if METHODS[method]().dense else {"budget": 48})
    expected = alone(model, method, ids, **sizes)
    assert set(parts) == {1}
    parts.clear()
    assert served(Batch(model, method, **SIZES, **sizes), ids, 130) == expected
    assert max(parts, default=0) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in COMMON])
def test_every_architecture_keeps_the_prompts_apart(parts: list[int], name: str) -> None:
    model = build_exact(name)
    ids = [prompt(1, n, seed=n)[0] for n in LENGTHS]
    expected = alone(model, "oracle", ids, 4, budget=160)
    parts.clear()
    assert served(Batch(model, "oracle", **SIZES, budget=160), ids, 130, 4) == expected
    if name in ("qwen3_next", "llama4", "gemma3n", "gemma4"):
        assert set(parts) == {1}
    else:
        assert max(parts) > 1


def test_options_of_requests_hold_in_a_shared_forward(model: PreTrainedModel, parts: list[int]) -> None:
    """Drawn tokens with log-probabilities; log-probabilities of the prompt take a forward of their own."""
    ids = [prompt(1, n, seed=n)[0] for n in (40, 30, 20)]
    how = {"sampling": Sampling(temperature=0.8, seed=3, logprobs=2)}
    batch = Batch(model, "oracle", budget=48, **SIZES)
    expected = [served(batch, [each], 1000, **how)[0] for each in ids]
    assert served(batch, ids, 100, **how) == expected
    assert max(parts) == 3
    parts.clear()
    served(batch, ids, 100, sampling=Sampling(temperature=0.0, prompt_logprobs=1))
    assert set(parts) == {1}


def test_a_kept_prefix_is_used(model: PreTrainedModel, parts: list[int]) -> None:
    """A prompt with a kept prefix goes on behind it; the others share a forward, and are kept too."""
    ids = [prompt(1, n, seed=n)[0] for n in (260, 40, 35)]
    sizes = SIZES | {"capacity": 300, "budget": 300}
    expected = alone(model, "oracle", ids, **sizes)
    batch = Batch(model, "oracle", **sizes, prefix_cache=PrefixCache(host_bytes=1 << 26))
    served(batch, ids[:1], 1000)
    parts.clear()
    assert served(batch, ids, 400) == expected
    assert sorted(parts) == [1, 1, 2]  # its kept rows, its rest, the others


def test_a_forward_that_fails_is_repeated_one_by_one(
    model: PreTrainedModel, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any layer; requests that decode meanwhile go on."""
    ids = [prompt(1, n, seed=n)[0] for n in (48, 40, 35)]
    expected = alone(model, "pariskv-plus", ids, budget=48)
    for layer in range(3):
        batch, failed = Batch(model, "pariskv-plus", budget=48, **SIZES), list[int]()
        scheduler = Scheduler(batch, step_tokens=100)
        first = scheduler.submit(ids[0], max_new_tokens=NEW, stop=())
        scheduler.step()
        attend = KVCache.attend

        def broken(kv: KVCache, own: Any, *given: Any, at: int = layer, attend: Any = attend, failed: Any = failed) -> Any:
            out = attend(kv, own, *given)
            if own.number == at and kv.sequences.filling and len(kv.sequences.filling) > 1:
                failed.append(at)
                raise CacheError("broken")
            return out

        monkeypatch.setattr(KVCache, "attend", broken)
        requests = [scheduler.submit(each, max_new_tokens=NEW, stop=()) for each in ids[1:]]
        while scheduler.busy:
            scheduler.step()
        monkeypatch.setattr(KVCache, "attend", attend)
        assert [request.tokens for request in (first, *requests)] == expected
        assert failed == [layer]
        assert not batch.requests


def test_requests_of_a_forward_that_failed_begin_again(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [prompt(1, n, seed=n)[0] for n in (260, 40, 35)]
    batch = Batch(model, "oracle", **SIZES | {"capacity": 300, "budget": 300}, prefix_cache=PrefixCache(host_bytes=1 << 26))
    served(batch, ids[:1], 1000)
    requests = [batch.join(each, max_new_tokens=1) for each in ids]
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "attend", lambda *_: [][0])
        with pytest.raises(IndexError):
            batch.prefill_together(requests)
    assert [(one.prefilled, one.filled, one.fetched) for one in requests] == [(0, 0, 0)] * 3
    assert not any(map(batch.cache.kv.sequences.length, range(3)))


def test_a_request_that_cannot_start_stops_no_other(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the shared forward, when its first token is drawn."""
    ids = [prompt(1, n, seed=n)[0] for n in (48, 40, 35)]
    expected = alone(model, "oracle", ids, budget=48)
    batch, start = Batch(model, "oracle", budget=48, **SIZES), Slots.start

    def broken(slots: Slots, request: Request) -> None:
        if request.prompt == 40:
            raise CacheError("broken")
        start(slots, request)

    monkeypatch.setattr(Slots, "start", broken)
    scheduler = Scheduler(batch, step_tokens=200)
    requests = [scheduler.submit(each, max_new_tokens=NEW, stop=()) for each in ids]
    told = []
    while scheduler.busy:
        told += scheduler.step()
    assert [requests[i].tokens for i in (0, 2)] == [expected[0], expected[2]]
    assert [request.finished for request in requests] == ["length", "error", "length"]
    assert told.count(requests[1]) == 1
