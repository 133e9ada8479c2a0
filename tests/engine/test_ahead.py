"""Steps that are launched before the tokens of the step before are read: on a GPU always, here because the test says so."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Batch, PrefixCache, Request, Sampling, Scheduler
from kvthaw.cache import finite, passes
from kvthaw.cache.kv_cache import KVCache
from kvthaw.errors import CacheError
from kvthaw.serve import watcher
from zoo import KINDS, build_exact, build_for, prompt

SIZES: dict[str, Any] = {"max_seqs": 3, "capacity": 200, "block_size": 16, "budget": 48}
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    Sampling(temperature=0.7, seed=5, top_k=20, min_tokens=4),
    Sampling(logprobs=2),
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=3)


@pytest.mark.parametrize("after", [4, 5, 6])
def test_a_flush_that_failed_ahead_is_repeated_after_another_request_left(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The longest prompt is paused, so that padding is cut when a request leaves: the ring is full again at that padded length."""
    ids = [prompt(1, n, seed=n)[0] for n in (60, 50, 160)]

    def decoded(*others: torch.Tensor) -> list[int]:
        batch = Batch(model, "oracle", **SIZES, prefill_chunk=64)
        first, *_ = requests = [batch.join(each, max_new_tokens=35, stop=()) for each in (ids[0], *others)]
        while len(batch.decoding) < min(2, len(requests)):
            batch.step()
        if others:
            batch.prefill(requests[2], 128)
            for _ in range(after):
                batch.decode()
            batch.leave(requests[1])
        while not first.finished:
            batch.decode()
        return first.tokens

    expected = decoded()
    run_ahead, failed = KVCache._run_ahead, list[Any]()

    def failing(kv: KVCache, layers: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(passes, "flush", lambda *given: failed.append(given) or 1 / 0)
            run_ahead(kv, layers)

    monkeypatch.setattr(KVCache, "_run_ahead", failing)
    assert decoded(*ids[1:]) == expected
    assert failed


def served(scheduler: Scheduler, seed: int, *, ahead: bool, cancels: bool = False) -> list[Request]:
    """Requests that come between random steps, each with the tokens that steps returned; some are given up."""
    draw, requests, told = random.Random(seed), list[Request](), dict[Request, list[int]]()
    scheduler.ahead = ahead
    coming = [
        (prompt(1, draw.randint(1, 120), seed=i)[0], draw.choice([1, 2, 5, 12]), SAMPLINGS[i % 5], draw.randint(0, 3))
        for i in range(9)
    ]
    while coming or scheduler.busy:
        for _ in range(min(len(coming), draw.randint(0, 2))):
            ids, new, sampling, priority = coming.pop()
            stops = prompt(1, 30, seed=len(coming))[0].tolist()
            new = max(new, sampling.min_tokens)
            how: dict[str, Any] = {"max_new_tokens": new, "stop": stops, "sampling": sampling}
            requests.append(scheduler.submit(ids, priority=priority, **how))
        for request in scheduler.step() if scheduler.busy else []:
            assert request.error is None
            told.setdefault(request, []).append(request.tokens[-1])
        if cancels and draw.random() < 0.2 and (running := scheduler.batch.requests):
            scheduler.cancel(draw.choice(running))
    assert not scheduler.batch.read()
    assert scheduler.batch.free == scheduler.batch.max_seqs
    assert all(told.get(request, []) == request.tokens for request in requests)
    return requests


@pytest.mark.parametrize("method", KINDS)
def test_requests_get_the_tokens_of_steps_that_are_read_at_once(method: str) -> None:
    model = build_for(method)
    found = [
        served(Scheduler(Batch(model, method, **SIZES), step_tokens=64), 7, ahead=ahead, cancels=False)
        for ahead in (True, False)
    ]
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
    assert [one.logprobs for one in found[0]] == [one.logprobs for one in found[1]]
    assert [one.finished for one in found[0]] == [one.finished for one in found[1]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["full", "thaw"])
def test_requests_that_are_given_up_leave_the_others_alone(method: str, seed: int) -> None:
    model, prefix = build_for(method), PrefixCache(host_bytes=1 << 24)
    batch = Batch(model, method, **SIZES, prefix_cache=prefix)
    whole = {one.spec.ids: one for one in served(Scheduler(Batch(model, method, **SIZES), step_tokens=64), seed, ahead=False)}
    texts = {tuple(ids.tolist()): one for ids, one in whole.items()}
    for one in served(Scheduler(batch, step_tokens=64), seed, ahead=True, cancels=True):
        expected = texts[tuple(one.spec.ids.tolist())]
        assert one.tokens == expected.tokens[: len(one.tokens)]
        assert one.finished in ("left", expected.finished)


def test_the_next_step_is_launched_before_tokens_are_read(model: PreTrainedModel) -> None:
    batch, ids = Batch(model, "full", **SIZES), prompt(1, 30)[0]
    scheduler, expected = Scheduler(batch), Batch(model, "full", **SIZES).join(ids, max_new_tokens=6, stop=())
    scheduler.ahead = True
    request = scheduler.submit(ids, max_new_tokens=6, stop=())
    known = []
    while scheduler.busy:
        scheduler.step()
        known.append((len(request.tokens), request.fed, request.unread))
    assert known == [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (5, 5, 1), (6, 5, 0)]
    assert expected.tokens == []


def test_a_stop_token_frees_the_slot_once_no_step_computes_the_request(model: PreTrainedModel) -> None:
    batch, ids = Batch(model, "thaw", **SIZES), prompt(1, 90)[0]
    first = batch.join(ids, max_new_tokens=9, stop=())
    while not first.finished:
        batch.step()
    scheduler = Scheduler(Batch(model, "thaw", **SIZES))
    scheduler.ahead, stop = True, next(token for i, token in enumerate(first.tokens) if token not in first.tokens[:i] and i)
    request = scheduler.submit(ids, max_new_tokens=9, stop=stop)
    other = scheduler.submit(prompt(1, 40, seed=2)[0], max_new_tokens=20, stop=())
    while not request.finished:
        scheduler.step()
    assert request.tokens == first.tokens[: first.tokens.index(stop) + 1]
    assert request.unread == 1
    assert (scheduler.batch.requests, scheduler.batch.free) == ([other], 1)
    scheduler.step()
    assert scheduler.batch.free == 2


def test_a_request_that_cannot_start_is_told_though_nothing_else_runs(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(Batch(model, "full", **SIZES))
    scheduler.ahead = True
    first, second = (scheduler.submit(prompt(1, 20, seed=i)[0], max_new_tokens=4, stop=()) for i in range(2))

    def short(_: Request) -> None:
        raise torch.OutOfMemoryError("short")

    monkeypatch.setattr(scheduler.batch._slots, "start", short)
    assert scheduler.step() == []
    assert scheduler.busy
    scheduler.cancel(second)  # its client leaves before anybody has told it
    assert scheduler.step() == [first]
    assert (first.finished, scheduler.busy) == ("error", False)
    with pytest.raises(CacheError, match="not in the batch"):
        scheduler.cancel(second)


@pytest.mark.parametrize("fails", ["join", "launch"])
def test_tokens_that_were_read_by_a_step_that_fails_come_with_the_next(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    scheduler = Scheduler(Batch(model, "full", **SIZES | {"max_seqs": 1 if fails == "join" else 2}))
    scheduler.ahead, told = True, dict[Request, list[int]]()
    requests = [scheduler.submit(prompt(1, 20, seed=i)[0], max_new_tokens=3, stop=(), priority=5) for i in range(2)]
    real, calls = getattr(scheduler.batch, fails), [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 + (fails == "launch"):
            raise RuntimeError("the device failed")
        return real(*given)

    monkeypatch.setattr(scheduler.batch, fails, failing)
    if fails == "launch":  # the slots are wanted, so tokens are read before it
        scheduler.step()
        scheduler.step()
        requests.append(scheduler.submit(prompt(1, 20, seed=9)[0], max_new_tokens=3, stop=(), priority=0))
        for request in requests[:2]:
            told[request] = list(request.tokens)
    while scheduler.busy:
        try:
            for request in scheduler.step():
                told.setdefault(request, []).append(request.tokens[-1])
        except RuntimeError:
            continue
    assert calls[0] > 2
    assert [told[request] for request in requests] == [request.tokens for request in requests]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags come to the host later, and only where it waits for them."""
    init = finite._Flags.__init__

    def later(flags: finite._Flags, layers: list[Any]) -> None:
        init(flags, layers)
        flags.on_gpu = True

    monkeypatch.setattr(finite._Flags, "__init__", later)


@pytest.mark.parametrize("ends", ["runs", "cancelled", "preempted"])
def test_a_prompt_that_is_not_finite_is_not_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """As on a GPU: it is known when the first token is read."""
    as_on_a_gpu(monkeypatch)
    ill = copy.deepcopy(model)
    with torch.no_grad():
        ill.get_input_embeddings().weight[7] = torch.nan
    prefix = PrefixCache(host_bytes=1 << 24)
    scheduler, ids = Scheduler(Batch(ill, "pariskv-plus", **SIZES, prefix_cache=prefix)), prompt(1, 90, seed=1)[0]
    scheduler.ahead, ids[20] = True, 7
    request = scheduler.submit(ids, max_new_tokens=5, stop=(), name="document")
    while not request.unread:
        scheduler.step()
    if ends == "cancelled":
        scheduler.cancel(request)
    elif ends == "preempted":
        scheduler.batch.preempt(request)
    else:
        while scheduler.busy:
            scheduler.step()
        assert "not finite" in str(request.error)
    assert (prefix.stats().kept_tokens, prefix.stats().names) == (0, [])


def test_of_prompts_in_one_forward_only_the_one_that_is_not_finite_fails(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    ill = copy.deepcopy(model)
    with torch.no_grad():
        ill.get_input_embeddings().weight[7] = torch.nan
    scheduler = Scheduler(Batch(ill, "pariskv-plus", **SIZES))
    given = [prompt(1, 40, seed=seed)[0].where(prompt(1, 40, seed=seed)[0] != 7, 8) for seed in (1, 2)]
    given[0][20] = 7
    one, two = (scheduler.submit(ids, max_new_tokens=5, stop=()) for ids in given)
    while scheduler.busy:
        scheduler.step()
    assert "not finite" in str(one.error)
    assert (two.error, len(two.tokens)) == (None, 5)


def test_a_change_of_method_frees_no_slot_of_another(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt fails when its first token is read, with a later step of it unread."""
    batch = Batch(model, "oracle", max_seqs=3, capacity=512, block_size=16, full_below=150, retrieved=512)
    scheduler = Scheduler(batch, step_tokens=400)
    scheduler.ahead = True
    requests = [scheduler.submit(prompt(1, 30, seed=i)[0], max_new_tokens=40, stop=()) for i in range(3)]
    scheduler.step()
    real = batch._slots.check_prompt

    def check(request: Request) -> None:
        if request is requests[0]:
            raise CacheError("not finite")
        real(request)

    monkeypatch.setattr(batch._slots, "check_prompt", check)
    while scheduler.busy:
        scheduler.step()
    monkeypatch.undo()
    assert batch.cache.kv.settings.full_below is not None
    assert [request.finished for request in requests] == ["error", "length", "length"]
    alone = Batch(model, "oracle", max_seqs=3, capacity=512, block_size=16, retrieved=512)
    for request in requests[1:]:
        own = alone.join(request.spec.ids, max_new_tokens=40, stop=())
        while own in alone.requests:
            alone.step()
        assert own.tokens == request.tokens


@pytest.mark.parametrize("ahead", [True, False])
def test_a_request_that_has_stopped_counts_until_its_slot_is_empty(model: PreTrainedModel, *, ahead: bool) -> None:
    """Host memory holds two requests. The third one comes when the first has given its blocks back."""
    sizes, ids = SIZES | {"max_seqs": 4, "capacity": 300}, [prompt(1, 140, seed=i)[0] for i in range(3)]
    batch = Batch(model, "thaw", **sizes)
    known = batch.join(ids[0], max_new_tokens=9, stop=())
    while not known.finished:
        batch.step()
    need = batch.admission.need(known)
    stop = next(token for i, token in enumerate(known.tokens) if i and token not in known.tokens[:i])
    scheduler = Scheduler(Batch(model, "thaw", **sizes, host_bytes=int(2.5 * need)), step_tokens=4096)
    scheduler.ahead = ahead
    requests = [scheduler.submit(each, max_new_tokens=9, stop=[] if i else [stop]) for i, each in enumerate(ids)]
    while scheduler.busy:
        scheduler.step()
    assert [request.finished for request in requests] == ["stop", "length", "length"]
    assert (scheduler.preemptions, scheduler.recomputed) == (0, 0)


def test_a_sampled_step_looks_at_a_request_that_it_computes(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its last token takes no part in it."""
    monkeypatch.setattr(watcher, "EVERY", 1)
    for turn in range(4):
        scheduler, seen = Scheduler(Batch(model, "thaw", **SIZES), step_tokens=400), list[float]()
        scheduler.ahead, watches = True, watcher.Watcher(scheduler.batch, seen.append)
        watches._steps = turn
        requests = [scheduler.submit(prompt(1, 100, seed=i)[0], max_new_tokens=n, stop=()) for i, n in enumerate((12, 12, 4))]
        scheduler.step()
        scheduler.step()
        scheduler.cancel(requests[1])
        while scheduler.busy:
            with watches.watching():
                scheduler.step()
        assert seen
        assert all(0 < mass <= 1.001 for mass in seen)


class InOrder:
    """Stands in for a grammar's matcher: accepts each output token once, in the order of the output."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_token(self, token: int) -> bool:
        self.accepted.append(token)
        return True

    def fill_next_token_bitmask(self, bits: Any) -> None:
        bits[:] = -1

    def reset(self) -> None:
        self.accepted.clear()


@pytest.mark.parametrize("launched", ["first", "second"])
def test_a_token_launched_before_its_request_is_preempted_is_not_read_twice(model: PreTrainedModel, launched: str) -> None:
    ids = prompt(1, 40)[0]
    (expected,) = served_alone(model, ids)
    batch = Batch(model, "oracle", **SIZES)
    request = batch.request(ids, max_new_tokens=6, stop=())
    matcher = request.matcher = InOrder()
    batch.join(request)
    batch.prefill(request)
    if launched == "second":
        batch.read()
        batch.launch()
    assert request.unread == 1
    batch.preempt(request)
    batch.join(request)
    batch.prefill(request)
    while not request.finished:
        assert request.error is None
        batch.read()
        assert matcher.accepted == request.tokens[: len(matcher.accepted)]
        batch.launch()
    assert request.tokens == expected
    assert request.unread == 0


def served_alone(model: PreTrainedModel, ids: torch.Tensor) -> list[list[int]]:
    batch = Batch(model, "oracle", **SIZES)
    request = batch.join(ids, max_new_tokens=6, stop=())
    while not request.finished:
        batch.step()
    return [request.tokens]
