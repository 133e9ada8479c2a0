"""Requests that wait, prefill in chunks beside others that decode, finish or are cancelled get the tokens that they get alone."""

from __future__ import annotations

import random
import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from counting import Launches
from kvthaw import Batch, CacheError, ConfigError, HostMemoryError, PrefixCache, QueueFullError, Request, Sampling, Scheduler
from kvthaw.engine.chunk_lengths import BUS, DEPTH, STREAMED, YIELDS, ChunkLengths, chunk_tokens, cpu_tokens, streamed_tokens
from kvthaw.engine.hf.model import attention_depth
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.forest import TreeIndex
from kvthaw.kernels.dense import worth_a_plan
from zoo import KINDS, build, build_exact, build_for, prompt


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Of three layers: omnikv's last one reuses what the one before has chosen."""
    return build_exact("llama", num_hidden_layers=3)


def settings_of(method: str) -> dict[str, Any]:
    if method == "full":
        return {"dense_layers": 1}
    return {"budget": 48, "dense_layers": int(method in ("streaming", "h2o", "quest", "oracle")), "block_size": 16}


def alone(model: PreTrainedModel, method: str, *asked: tuple[torch.Tensor, int], capacity: int = 200) -> list[list[int]]:
    """The tokens of requests whose prompts go through the model at once; a batch gives each what it gets alone."""
    batch = Batch(model, method, max_seqs=len(asked), capacity=capacity, **settings_of(method))
    requests = [batch.join(ids, max_new_tokens=new, stop=()) for ids, new in asked]
    while batch.requests:
        batch.step()
    return [request.tokens for request in requests]


def test_a_joining_prompt_is_indexed_a_few_layers_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = build_exact("llama", num_hidden_layers=6)
    built: list[int] = []
    build_one = ClusterIndex.build
    monkeypatch.setattr(
        ClusterIndex, "build", lambda index, *given: (built.append(index.context.layer), build_one(index, *given))
    )
    scheduler = Scheduler(Batch(deep, "clusterkv", max_seqs=2, capacity=200, budget=48, block_size=16), step_tokens=40)
    first, ids = scheduler.submit(prompt(1, 9)[0], max_new_tokens=40, stop=()), prompt(1, 120)[0]
    while not first.tokens:
        scheduler.step()
    joining, steps = scheduler.submit(ids, max_new_tokens=4, stop=()), list[int]()
    while not joining.tokens:
        built.clear()
        before = joining.prefilled
        assert first in scheduler.step()
        steps.append(len(built))
        assert not built or joining.prefilled == before, "what a step brings the next one waits for: not both at once"
    assert max(steps) < sum(steps) == len(scheduler.batch.cache.kv.offloaded)
    while scheduler.busy:
        scheduler.step()
    batch = Batch(deep, "clusterkv", max_seqs=1, capacity=200, budget=48, block_size=16)
    own = batch.join(ids, max_new_tokens=4, stop=())
    while batch.requests:
        batch.step()
    assert joining.tokens == own.tokens


@pytest.mark.parametrize("method", KINDS)
def test_everyone_gets_the_tokens_of_being_alone(method: str) -> None:
    """Prompts come in chunks between the steps of others; some are cancelled while they wait, prefill or decode."""
    model = build_for(method)
    batch = Batch(model, method, max_seqs=3, capacity=200, prefill_chunk=64, **settings_of(method))
    scheduler = Scheduler(batch, step_tokens=24)
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((90, 12), (30, 16), (130, 6), (7, 9), (100, 5), (12, 4))]
    requests = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked]
    seen, beside = [], False
    for step in range(100):
        seen += scheduler.step()
        beside |= bool(scheduler.prefilling and scheduler.decoding)
        if step == 1:
            scheduler.cancel(scheduler.waiting[-1])
        if step == 4 and scheduler.prefilling:
            scheduler.cancel(scheduler.prefilling[-1])
        if step == 9 and scheduler.decoding:
            scheduler.cancel(scheduler.decoding[0])
    assert not scheduler.busy
    assert beside or method == "h2o"
    assert sum(one.finished == "left" for one in requests) in (2, 3)
    assert sum(len(one.tokens) for one in requests) == len(seen)
    for one, own, (_, new) in zip(requests, alone(model, method, *asked), asked, strict=True):
        assert one.tokens == own[: len(one.tokens)]
        assert one.finished == "left" or len(one.tokens) == new
    assert batch.stats().kv_host_bytes == 0


def test_others_decode_while_a_long_prompt_comes(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=3, capacity=400, **settings_of("oracle")), step_tokens=20)
    first = scheduler.submit(prompt(1, 30)[0], max_new_tokens=60, stop=())
    scheduler.step()
    long = scheduler.submit(prompt(1, 300)[0], max_new_tokens=2, stop=())
    scheduler.step()
    short = scheduler.submit(prompt(1, 15)[0], max_new_tokens=2, stop=())
    steps = 0
    while not long.tokens:
        before = len(first.tokens)
        scheduler.step()
        steps += 1
        assert len(first.tokens) == before + 1
        if steps == 2:
            assert short.tokens, "a short prompt does not wait for a long one"
    assert 300 // 20 <= steps < 20


class Held:
    """Index builds on the host that wait until they are released, and may fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.released, self.error = threading.Event(), threading.Event(), None
        build = TreeIndex.build

        def held(index: TreeIndex, *given: Any) -> None:
            if threading.current_thread().name.startswith("kvthaw-build"):
                self.begun.set()
                assert self.released.wait(120)  # kernels may be compiled meanwhile
                if self.error is not None:
                    raise self.error
            build(index, *given)

        patch.setattr(TreeIndex, "build", held)


@pytest.mark.parametrize(
    ("method", "ends"),
    [("icecache", "built"), ("icecache", "failed"), ("icecache-digest", "built"), ("icecache-digest", "cancelled")],
)
def test_others_decode_while_the_host_builds_an_index(
    model: PreTrainedModel, method: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((60, 40), (130, 6), (70, 9))]
    plain = alone(model, method, *asked)
    held = Held(monkeypatch)
    held.released.set()
    batch = Batch(model, method, max_seqs=2, capacity=200, **settings_of(method))
    scheduler = Scheduler(batch, step_tokens=100)
    first = scheduler.submit(asked[0][0], max_new_tokens=40, stop=())
    while not first.tokens:
        scheduler.step()
    held.released.clear()
    second = scheduler.submit(asked[1][0], max_new_tokens=6, stop=())
    while second.prefilled < second.prompt:
        scheduler.step()
    assert held.begun.wait(20)
    for _ in range(20):  # whose rings leave for the index meanwhile
        before = len(first.tokens)
        assert scheduler.step() == [first]
        assert len(first.tokens) == before + 1
    assert (scheduler.prefilling, second.tokens) == ([second], [])
    if ends == "cancelled":
        scheduler.cancel(second)
        assert batch.free == 1
    held.error = ValueError("no index") if ends == "failed" else None
    held.released.set()
    if ends == "failed":
        while not second.finished:
            scheduler.step()
        assert isinstance(second.error, CacheError)
        held.error = None
    third = scheduler.submit(asked[2][0], max_new_tokens=9, stop=())
    while scheduler.busy:
        scheduler.step()
    assert [first.tokens, third.tokens] == [plain[0], plain[2]]
    assert second.tokens == (plain[1] if ends == "built" else [])
    assert batch.stats().kv_host_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["icecache", "icecache-digest"])
def test_a_gpu_decodes_while_the_host_builds_an_index(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", max_position_embeddings=4096).to("cuda")
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((300, 60), (1500, 20))]
    expected, sizes = [], {"max_seqs": 2, "capacity": 2048, "budget": 128, "block_size": 64}
    for one in asked:
        expected += together(Scheduler(Batch(model, method, capture=False, **sizes), step_tokens=512), one)[1]
    scheduler, held = Scheduler(Batch(model, method, **sizes), step_tokens=512), Held(monkeypatch)
    held.released.set()
    first = scheduler.submit(asked[0][0], max_new_tokens=asked[0][1], stop=())
    while not first.tokens:
        scheduler.step()
    held.released.clear()  # before the second prompt comes, whose index would be built by now
    second = scheduler.submit(asked[1][0], max_new_tokens=asked[1][1], stop=())
    while second.prefilled < second.prompt:
        scheduler.step()
    assert held.begun.wait(20)
    for _ in range(20):
        assert scheduler.step() == [first]
    held.released.set()
    while scheduler.busy:
        scheduler.step()
    assert [first.tokens, second.tokens] == expected


def test_places_go_by_priority_then_by_arrival(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=1, capacity=100, budget=48))
    requests = [scheduler.submit([i + 1] * 4, max_new_tokens=2, stop=(), priority=p) for i, p in enumerate((0, 1, 0, -1))]
    order: list[Request] = []
    while scheduler.busy:
        order += [one for one in scheduler.step() if one.finished]
    assert [requests.index(one) for one in order] == [3, 0, 2, 1]


def finished(scheduler: Scheduler) -> list[Request]:
    """The requests, in the order in which they end."""
    order = list[Request]()
    while scheduler.busy:
        order += [one for one in scheduler.step() if one.finished]
    return order


def test_a_flood_of_one_client_leaves_the_next_place_to_another(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=1, capacity=100, budget=48), step_tokens=50 * YIELDS)
    flood = [scheduler.submit([i + 1] * 40, max_new_tokens=6, stop=(), client="many") for i in range(4)]
    scheduler.step()
    later = [scheduler.submit([9 + i] * 4, max_new_tokens=2, stop=(), client="few") for i in range(3)]
    assert finished(scheduler) == [flood[0], *later, *flood[1:]]


def test_a_client_that_asks_for_little_is_ahead_by_little(model: PreTrainedModel) -> None:
    """By two steps' tokens, although its requests never wait for long."""
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=1, capacity=100, budget=48), step_tokens=16)
    flood = [scheduler.submit([i + 1] * 40, max_new_tokens=6, stop=(), client="many") for i in range(3)]
    order = list[Request]()
    for i in range(12):
        one = scheduler.submit([9 + i] * 4, max_new_tokens=2, stop=(), client="few")
        while not one.finished:
            order += [each for each in scheduler.step() if each.finished]
    order += finished(scheduler)
    assert order.index(flood[1]) - order.index(flood[0]) in range(6, 9)


def test_clients_that_wait_together_get_places_by_turns(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=4, capacity=100, budget=48))
    asked = [scheduler.submit([i + 1] * 20, max_new_tokens=9, stop=(), client=client) for i, client in enumerate("aaaabbb")]
    while scheduler.batch.free:
        scheduler.step()
    assert {asked.index(one) for one in scheduler.batch.requests} == {0, 1, 4, 5}


def test_the_next_chunk_is_of_the_client_with_the_least(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "full", max_seqs=4, capacity=200, **settings_of("full")), step_tokens=16)
    running = scheduler.submit([7] * 4, max_new_tokens=60, stop=(), client="another")
    while not running.tokens:
        scheduler.step()
    flood = [scheduler.submit(prompt(1, 150, seed=i)[0], max_new_tokens=2, stop=(), client="many") for i in range(2)]
    for _ in range(3):
        scheduler.step()
    seen = [one.prefilled for one in flood]
    short = scheduler.submit(prompt(1, 30, seed=3)[0], max_new_tokens=2, stop=(), client="few")
    scheduler.step()
    scheduler.step()
    assert short.prefilled == 30
    assert sum(one.prefilled for one in flood) - sum(seen) < 16


def test_chunks_are_smaller_while_a_client_with_less_service_decodes(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "full", max_seqs=4, capacity=500, **settings_of("full")), step_tokens=132)

    def chunks(long: Request, steps: int) -> list[int]:
        seen = [long.prefilled]
        for _ in range(steps):
            scheduler.step()
            seen.append(long.prefilled)
        return [b - a for a, b in pairwise(seen)]

    own = scheduler.submit([5] * 4, max_new_tokens=60, stop=(), client="many")
    while not own.tokens:
        scheduler.step()
    long = scheduler.submit(prompt(1, 450)[0], max_new_tokens=2, stop=(), client="many")
    before = chunks(long, 1)
    other = scheduler.submit([7] * 4, max_new_tokens=16, stop=(), client="few")
    while not other.tokens:
        scheduler.step()
    chunks(long, 1)  # after which it has had a step more than the other
    beside = chunks(long, 2 * YIELDS)  # and on a CPU only in some of the steps
    assert sum(chunk > 0 for chunk in beside) == 2
    assert 0 < 3 * max(beside) < before[0]
    while not other.finished:
        scheduler.step()
    assert chunks(long, 1)[0] <= max(beside), "the other may soon come back"
    assert chunks(long, 1)[0] > 3 * max(beside)
    finished(scheduler)
    asked = (prompt(1, 450)[0], 2), ([7] * 4, 16)
    assert [long.tokens, other.tokens] == alone(model, "full", *asked, capacity=500)


@pytest.mark.parametrize(("clients", "steps"), [(1, 4), (3, 12), (6, 16)])
def test_chunks_are_rarer_the_more_clients_have_had_less(model: PreTrainedModel, clients: int, steps: int) -> None:
    """On a CPU; a chunk of 32 tokens is no more than what each of them gets in 16 steps."""
    batch = Batch(model, "full", max_seqs=clients + 2, capacity=500, **settings_of("full"))
    scheduler = Scheduler(batch)
    own = scheduler.submit(prompt(1, 200)[0], max_new_tokens=200, stop=(), client="many")
    while not own.tokens:
        scheduler.step()
    others = [scheduler.submit([7 + i] * 4, max_new_tokens=90, stop=(), client=f"few {i}") for i in range(clients)]
    while not all(one.tokens for one in others):
        scheduler.step()
    long, came = scheduler.submit(prompt(1, 400)[0], max_new_tokens=1, stop=(), client="many"), list[int]()
    for step in range(3 * steps):
        before = long.prefilled
        scheduler.step()
        came += [step] if long.prefilled > before else []
    assert long.prefilled == 32 * len(came)
    assert [b - a for a, b in pairwise(came)] == [steps] * 2


def test_all_clients_without_slots_get_them_in_one_step(model: PreTrainedModel) -> None:
    """Each costs the others a step otherwise."""
    batch = Batch(model, "full", max_seqs=4, capacity=100, prefix_cache=PrefixCache(), **settings_of("full"))
    scheduler, ids = Scheduler(batch), [prompt(1, 20, seed=i)[0] for i in range(7)]
    flood = [scheduler.submit(one, max_new_tokens=40, stop=(), client="many") for one in ids[:4]]
    while len(scheduler.decoding) < 4:
        scheduler.step()
    short = [scheduler.submit(one, max_new_tokens=4, stop=(), client=f"few {i}") for i, one in enumerate(ids[4:])]
    scheduler.step()
    assert {one.spec.client for one in batch.requests} == {"many", "few 0", "few 1", "few 2"}
    finished(scheduler)
    asked = [(one, 40) for one in ids[:4]] + [(one, 4) for one in ids[4:]]
    assert [one.tokens for one in (*flood, *short)] == alone(model, "full", *asked, capacity=100)


def test_a_step_full_of_decoding_requests_leaves_tokens_for_a_client_that_yields(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "full", max_seqs=18, capacity=300, **settings_of("full")), step_tokens=40)
    many = scheduler.submit(prompt(1, 10)[0], max_new_tokens=40, stop=(), client="many")
    scheduler.step()
    few = [scheduler.submit([3 + i] * 2, max_new_tokens=30, stop=(), client="few") for i in range(16)]
    while not all(one.tokens for one in few):
        scheduler.step()
    long = scheduler.submit(prompt(1, 200)[0], max_new_tokens=1, stop=(), client="many")
    steps = 0
    while not long.finished:
        scheduler.step()
        steps += 1
    assert steps < 16
    assert not many.finished or many.error is None


def test_a_client_without_a_place_gets_one_of_several(model: PreTrainedModel) -> None:
    """A request that gives way goes on later, and each short one asks for one place at most."""
    batch = Batch(model, "full", max_seqs=3, capacity=100, **settings_of("full"))
    scheduler, ids = Scheduler(batch), [prompt(1, 20, seed=i)[0] for i in range(6)]
    flood = [scheduler.submit(one, max_new_tokens=40, stop=(), client="many") for one in ids[:4]]
    while len(scheduler.decoding) < 3:
        scheduler.step()
    short = [scheduler.submit(one, max_new_tokens=4, stop=(), client="few") for one in ids[4:]]
    for _ in range(2):
        scheduler.step()
    assert [one.seq >= 0 for one in (*flood, *short)] == [True, True, False, False, True, False]
    assert finished(scheduler)[:2] == short
    assert scheduler.preemptions <= len(short)
    asked = [(one, 40) for one in ids[:4]] + [(one, 4) for one in ids[4:]]
    assert [one.tokens for one in (*flood, *short)] == alone(model, "full", *asked, capacity=100)


def test_a_request_that_gives_way_does_not_get_its_place_back_at_once(model: PreTrainedModel) -> None:
    """It would give way in every step, and get no token, while the client without a place has had more service."""
    batch = Batch(model, "quest", max_seqs=3, capacity=500, **settings_of("quest"))
    scheduler = Scheduler(batch)
    scheduler.submit(prompt(1, 20)[0], max_new_tokens=400, stop=(), client="c")
    served = scheduler.submit(prompt(1, 400)[0], max_new_tokens=2, stop=(), client="b")
    while not served.finished:
        scheduler.step()
    several = [scheduler.submit(prompt(1, 20)[0], max_new_tokens=200, stop=(), client="a") for _ in range(2)]
    while not all(one.tokens for one in several):
        scheduler.step()
    waits, before = scheduler.submit(prompt(1, 20)[0], max_new_tokens=50, stop=(), client="b"), len(several[1].tokens)
    for _ in range(10):
        scheduler.step()
    assert scheduler.preemptions == 0
    assert len(several[1].tokens) >= before + 10
    while not waits.tokens:
        scheduler.step()
    assert scheduler.preemptions == 1


def test_a_client_that_holds_one_place_keeps_it(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    for client in "abcdef":
        scheduler.submit([5] * 4, max_new_tokens=6, stop=(), client=client)
    finished(scheduler)
    assert scheduler.preemptions == 0


def beside_another(batch: Batch, **how: Any) -> tuple[Scheduler, Request]:
    """A scheduler that decodes a client's request and has prefilled a part of another one's 400 tokens, in its only other slot."""
    scheduler = Scheduler(batch, step_tokens=64)
    running = scheduler.submit([5] * 4, max_new_tokens=80, stop=(), client="another")
    while not running.tokens:
        scheduler.step()
    long = scheduler.submit(prompt(1, 400)[0], max_new_tokens=3, stop=(), client="many", **how)
    while long.prefilled < 100:
        scheduler.step()
    assert long.prefilled < 350
    return scheduler, long


@pytest.mark.parametrize("method", ["full", "icecache-digest", "clusterkv-plus"])
def test_a_prompt_gives_way_to_a_client_with_less_service_and_continues(model: PreTrainedModel, method: str) -> None:
    """It holds the only slot of its client. No work is lost, and no token that it had computed counts as cached."""
    batch = Batch(model, method, max_seqs=2, capacity=500, prefix_cache=PrefixCache(), **settings_of(method))
    scheduler, long = beside_another(batch)
    had = long.prefilled
    short = scheduler.submit([7] * 4, max_new_tokens=4, stop=(), client="few")
    scheduler.step()
    assert long.seq < 0 <= short.seq
    assert finished(scheduler)[0] is short
    assert (scheduler.preemptions, long.filled, long.cached_tokens) == (1, had, 0)
    asked = (prompt(1, 400)[0], 3), ([7] * 4, 4)
    assert [long.tokens, short.tokens] == alone(model, method, *asked, capacity=500)


def test_a_prompt_gives_way_with_the_log_probabilities_that_it_has(model: PreTrainedModel) -> None:
    """Else it would hold its slot for all of its prompt, and those who wait would wait as long."""
    asked = {"sampling": Sampling(temperature=0.0, prompt_logprobs=2, logprobs=2)}
    plain = Batch(model, "full", max_seqs=1, capacity=500, prefix_cache=(cache := PrefixCache()), **settings_of("full"))
    alone = plain.join(prompt(1, 400)[0], max_new_tokens=3, stop=(), **asked)
    while plain.requests:
        plain.step()
    again = plain.join(prompt(1, 400)[0], max_new_tokens=3, stop=(), **asked)
    while plain.requests:
        plain.step()
    assert (again.filled, again.prompt_logprobs) == (0, alone.prompt_logprobs), "what others have prefilled has none"
    assert cache.known(plain.cache.kv, again.spec.ids) > 0
    batch = Batch(model, "full", max_seqs=2, capacity=500, prefix_cache=PrefixCache(), **settings_of("full"))
    scheduler, long = beside_another(batch, **asked)
    had = long.prefilled
    short = scheduler.submit([7] * 4, max_new_tokens=4, stop=(), client="few")
    scheduler.step()
    assert long.seq < 0 <= short.seq
    finished(scheduler)
    assert (scheduler.preemptions, long.filled, long.cached_tokens) == (1, had, 0)
    assert len(long.prompt_logprobs) == 400
    assert long.prompt_logprobs[0] is None
    pairs = zip(long.prompt_logprobs[1:] + long.logprobs, alone.prompt_logprobs[1:] + alone.logprobs, strict=True)
    assert all(one is not None and other is not None and abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)


def test_a_prompt_that_would_begin_again_does_not_give_way(model: PreTrainedModel) -> None:
    scheduler, long = beside_another(Batch(model, "full", max_seqs=2, capacity=500, **settings_of("full")))
    scheduler.submit([7] * 4, max_new_tokens=4, stop=(), client="few")
    while long.prefilled < long.prompt:
        assert long.seq >= 0
        scheduler.step()
    assert long in finished(scheduler)
    assert scheduler.recomputed == 0


def together(scheduler: Scheduler, *asked: tuple[torch.Tensor, int]) -> tuple[int, list[list[int]]]:
    """Serve requests. Returns how many had places at a time, and their tokens."""
    requests, most = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked], 0
    while scheduler.busy:
        scheduler.step()
        most = max(most, len(scheduler.batch.requests))
    assert [one.error for one in requests] == [None] * len(asked)
    return most, [one.tokens for one in requests]


@pytest.mark.parametrize(
    ("where", "room", "places"),
    [("host_bytes", 1.2, 1), ("device_memory", 1.2, 1), ("device_memory", 2.2, 2), ("system", 1.2, 1)],
)
def test_memory_is_counted_wherever_blocks_may_lie(
    model: PreTrainedModel, where: str, room: float, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt(1, n, seed=n)[0], 8) for n in (100, 90)]
    plain = alone(model, "oracle", *asked)
    batch = Batch(model, "oracle", max_seqs=2, capacity=200, **settings_of("oracle"))
    batch.prefill(batch.join(asked[0][0], max_new_tokens=8, stop=()))
    (request,) = batch.requests
    need, fixed = batch.admission.need(request), sum(layer.fixed_bytes() for layer in batch.cache.kv.layers)
    sizes: dict[str, Any] = {"host_bytes": {"host_bytes": int(room * need)}, "system": {}}.get(
        where, {"host_bytes": need // 8, "device_memory": fixed + int(room * need)}
    )
    batch = Batch(model, "oracle", max_seqs=2, capacity=200, **settings_of("oracle"), **sizes)
    if where == "system":
        held = batch.cache.kv.streams.memory
        monkeypatch.setattr(held, "free", lambda: int(room * need) - sum(x.host_bytes() for x in batch.cache.kv.layers))
    scheduler = Scheduler(batch)
    assert together(scheduler, *asked) == (places, plain)
    if (where, places) == ("host_bytes", 1):
        with pytest.raises(HostMemoryError, match="leave"):
            scheduler.submit(prompt(1, 190)[0], stop=())


def test_memory_that_a_request_has_taken_is_not_counted_again(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(model, "oracle", max_seqs=2, capacity=200, **settings_of("oracle"))
    first = batch.join(prompt(1, 100)[0], max_new_tokens=8, stop=())
    batch.prefill(first)
    second = batch.request(prompt(1, 90)[0], max_new_tokens=8)
    room = int(1.5 * batch.admission.need(second))
    monkeypatch.setattr(batch.cache.kv.streams.memory, "free", lambda: room)
    assert batch.admission.fits(second, [first])
    assert not batch.admission.fits(second, [second])


@pytest.mark.parametrize(("crossing", "places"), [(400, 2), (100, 1)])
def test_full_attention_counts_what_the_method_may_need_after_it(model: PreTrainedModel, crossing: int, places: int) -> None:
    """Requests that may pass the crossing together need host memory for both; those that cannot need none."""
    asked = [(prompt(1, n, seed=n)[0], 20) for n in (100, 90)]
    batch = Batch(model, "auto", max_seqs=2, capacity=200, budget=48, block_size=16, full_below=crossing, host_bytes=200_000)
    need = batch.admission.need(batch.request(asked[0][0], max_new_tokens=20))
    assert 100_000 < need < 200_000
    assert together(Scheduler(batch), *asked)[0] == places


def test_chunks_hide_the_bus_that_brings_earlier_ones_back(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.engine.chunk_lengths.STREAMED", 64)
    for streams, chunk in ((True, 64), (False, 19)):
        monkeypatch.setattr(ChunkLengths, "streams_back", lambda *_, streams=streams: streams)
        scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=200, budget=48), step_tokens=20)
        scheduler.submit([1, 2, 3], max_new_tokens=9, stop=())
        scheduler.step()
        long = scheduler.submit(prompt(1, 150)[0], max_new_tokens=1, stop=())
        scheduler.step()
        assert long.prefilled == chunk


def test_chunks_become_smaller_deeper_in_a_prompt(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk after as many tokens as its own other work is worth has half of the tokens."""
    monkeypatch.setattr("kvthaw.engine.chunk_lengths.DEPTH", 40)
    scheduler = Scheduler(Batch(model, "full", max_seqs=2, capacity=200), step_tokens=41)
    scheduler.submit([1, 2, 3], max_new_tokens=30, stop=())
    scheduler.step()
    long, ends = scheduler.submit(prompt(1, 150)[0], max_new_tokens=1, stop=()), list[int]()
    while not long.finished:
        scheduler.step()
        ends.append(long.prefilled)
    assert ends[:3] == [40, 60, 76]
    assert ends[-1] == 150


def test_chunks_that_wait_for_the_bus_grow_with_what_it_brings() -> None:
    """A chunk computes for as long as the bus needs: tokens at 1 + depth / DEPTH, the bus depth / DEPTH for BUS of them."""
    for depth in range(0, 1 << 20, 8192):
        tokens = streamed_tokens(depth)
        assert tokens % 512 == 0
        assert tokens >= STREAMED
        assert tokens * (1 + depth / DEPTH) > 0.88 * BUS * depth / DEPTH
        assert tokens == STREAMED or tokens < BUS
    assert [streamed_tokens(1024 * depth) for depth in (0, 64, 128, 512)] == [2048, 2048, 2048, 2560]


def test_the_end_of_a_prompt_that_comes_over_the_bus_is_one_chunk(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk waits until all that is before it has come."""
    monkeypatch.setattr("kvthaw.engine.chunk_lengths.STREAMED", 64)
    monkeypatch.setattr("kvthaw.engine.chunk_lengths.DEPTH", 40)
    monkeypatch.setattr("kvthaw.engine.chunk_lengths._FEW", 16)
    monkeypatch.setattr(ChunkLengths, "streams_back", lambda *_: True)
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=200, budget=48), step_tokens=20)
    scheduler.submit([1, 2, 3], max_new_tokens=9, stop=())
    scheduler.step()
    long = scheduler.submit(prompt(1, 64 + 55)[0], max_new_tokens=1, stop=())
    scheduler.step()
    monkeypatch.setattr("kvthaw.engine.chunk_lengths.BUS", 64)
    scheduler.step()
    assert long.prefilled == 64 + 55


@pytest.mark.parametrize("step_tokens", [600, 4096, 5000])
def test_chunks_of_a_long_prompt_have_few_sizes_and_take_as_long(step_tokens: int) -> None:
    depth, sizes = 0, set[int]()
    while depth < 1 << 19:
        chunk = chunk_tokens(step_tokens, depth, decoded=7)
        work = chunk * (1 + depth / DEPTH)
        assert chunk == 512 or (chunk % 512 == 0 and step_tokens / 2 < work <= step_tokens)
        assert worth_a_plan(7 * chunk, 65536)  # in any group of query heads
        depth, sizes = depth + chunk, sizes | {chunk}
    assert len(sizes) <= 6


def test_a_chunk_that_is_not_finite_is_told_with_the_next(model: PreTrainedModel) -> None:
    """To its own request alone, and without the host waiting for the device after every chunk."""
    scheduler = Scheduler(Batch(model, "quest", max_seqs=2, capacity=200, **settings_of("quest")), step_tokens=20)
    one = scheduler.submit(prompt(1, 60)[0], max_new_tokens=30, stop=())
    while not one.tokens:
        scheduler.step()
    two = scheduler.submit(prompt(1, 70)[0], max_new_tokens=5, stop=())
    poison = model.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, given, out: out * torch.nan if out.shape[1] > 1 and two.prefilled < 19 else out
    )
    while not two.finished:
        scheduler.step()
    poison.remove()
    assert two.prefilled <= 38
    assert (two.tokens, str(two.error)) == (
        [],
        "the model gave keys or values that are not finite in layer 1, sequence 1; crop or reset() the cache",
    )
    while scheduler.busy:
        scheduler.step()
    assert [one.tokens] == alone(model, "quest", (prompt(1, 60)[0], 30))


def test_a_failing_prompt_ends_and_the_others_go_on(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "quest", max_seqs=2, capacity=200, **settings_of("quest")), step_tokens=20)
    ids = [prompt(1, n, seed=n)[0] for n in (60, 70)]
    one = scheduler.submit(ids[0], max_new_tokens=20, stop=())
    while not one.tokens:
        scheduler.step()
    two = scheduler.submit(ids[1], max_new_tokens=5, stop=())
    scheduler.step()

    def fail(*_: object) -> None:
        if scheduler.prefilling and model.training is False and two.prefilled >= 20:
            raise RuntimeError("lost")

    hook = model.model.layers[1].register_forward_hook(lambda module, given, out: fail() if out[0].shape[-2] > 2 else None)
    try:
        while two.finished is None:
            scheduler.step()
    finally:
        hook.remove()
    assert two.finished == "error"
    assert str(two.error) == "lost"
    while scheduler.busy:
        scheduler.step()
    assert [one.tokens] == alone(model, "quest", (ids[0], 20))


@pytest.mark.parametrize("error", [HostMemoryError("short"), torch.OutOfMemoryError("short")])
def test_requests_without_memory_wait_and_go_on(
    model: PreTrainedModel, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode step the one that came last gives its place up, in a prompt the one whose it is; nobody sees an error."""
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((60, 20), (30, 16), (50, 9))]
    scheduler = Scheduler(Batch(model, "quest", max_seqs=3, capacity=200, **settings_of("quest")), step_tokens=24)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.3, seed=2)
    requests = [scheduler.submit(ids, max_new_tokens=new, stop=(), sampling=sampling) for ids, new in asked]
    layer, told, short, calls = scheduler.batch.cache.kv.layers[1], [], [2, 12, 20], []

    def lacking(take: Any, *given: Any) -> Any:
        calls.append(given)
        if short and len(calls) >= short[0] and len(scheduler.batch.requests) > 1:
            short.pop(0)
            raise error
        return take(*given)

    for name in ("prefill", "decode"):
        monkeypatch.setattr(layer, name, partial(lacking, getattr(layer, name)))
    while scheduler.busy:
        told += scheduler.step()
    assert scheduler.preemptions == 3
    assert len(told) == sum(new for _, new in asked)
    whole = Batch(model, "quest", max_seqs=3, capacity=200, **settings_of("quest"))
    alone = [whole.join(ids, max_new_tokens=new, stop=(), sampling=sampling) for ids, new in asked]
    while whole.requests:
        whole.step()
    assert [one.tokens for one in requests] == [one.tokens for one in alone]
    assert scheduler.batch.stats().kv_host_bytes == 0


def test_none_overtakes_a_request_that_waits_for_memory(model: PreTrainedModel) -> None:
    """Else small ones could come without an end, and a large one would never have its turn."""
    whole = Batch(model, "oracle", max_seqs=3, capacity=200, **settings_of("oracle"))
    whole.prefill(whole.join(prompt(1, 60)[0], max_new_tokens=20, stop=()))
    need = whole.admission.need(whole.requests[0])
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=3, capacity=200, host_bytes=2 * need, **settings_of("oracle")))
    first = scheduler.submit(prompt(1, 60)[0], max_new_tokens=20, stop=())
    while not first.tokens:
        scheduler.step()
    large, small = (scheduler.submit(prompt(1, n)[0], max_new_tokens=2, stop=()) for n in (120, 10))
    while not first.finished:
        assert scheduler.waiting == [large, small]
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    assert (large.finished, small.finished) == ("length", "length")


@pytest.mark.parametrize(("priorities", "loser"), [((0, 0), 1), ((1, 0), 0)])
def test_the_last_in_order_gives_its_place_up(
    model: PreTrainedModel, priorities: tuple[int, int], loser: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short() -> None:
        raise HostMemoryError("short")

    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    requests = [scheduler.submit([5] * 4, max_new_tokens=6, stop=(), priority=priority) for priority in priorities]
    while len(scheduler.decoding) < 2:
        scheduler.step()
    monkeypatch.setattr(scheduler.batch, "launch", short)
    scheduler.step()
    assert scheduler.waiting == [requests[loser]]
    assert scheduler.decoding == [requests[1 - loser]]


def test_a_chunk_is_launched_before_tokens_are_read(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the device goes on while the host waits. Tokens come all the same where the chunk fails."""
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    first = scheduler.submit([5] * 4, max_new_tokens=6, stop=())
    while not first.tokens:
        scheduler.step()
    second, known = scheduler.submit([5] * 4, max_new_tokens=6, stop=()), len(first.tokens)

    def failing(*_: object) -> bool:
        assert len(first.tokens) == known
        raise RuntimeError("the chunk failed")

    monkeypatch.setattr(scheduler.batch, "prefill", failing)
    assert set(scheduler.step()) == {first, second}
    assert (len(first.tokens), str(second.error)) == (known + 1, "the chunk failed")


def test_a_request_that_cannot_join_waits_and_others_get_their_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    first = scheduler.submit([5] * 4, max_new_tokens=6, stop=())
    while not first.tokens:
        scheduler.step()
    second, place = scheduler.submit([6] * 4, max_new_tokens=6, stop=()), Request.place

    def short(*given: Any) -> None:
        monkeypatch.setattr(Request, "place", place)
        raise torch.OutOfMemoryError("short")

    monkeypatch.setattr(Request, "place", short)
    while not first.finished:
        assert scheduler.step() == [first], "it is told of each token"
        assert scheduler.waiting == [second]
    while scheduler.busy:
        scheduler.step()
    assert [second.tokens] == alone(model, "oracle", (torch.tensor([6] * 4), 6))


def test_a_request_that_cannot_join_alone_is_not_lost(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    request = scheduler.submit([5] * 4, max_new_tokens=6, stop=())
    place = Request.place

    def short(*given: Any) -> None:
        monkeypatch.setattr(Request, "place", place)
        raise torch.OutOfMemoryError("short")

    monkeypatch.setattr(Request, "place", short)
    with pytest.raises(torch.OutOfMemoryError):
        scheduler.step()
    assert scheduler.waiting == [request]
    while scheduler.busy:
        scheduler.step()
    assert len(request.tokens) == 6


def test_what_ends_before_an_error_of_a_split_model_comes_up_is_forgotten(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that gets its last token in that step, and the one whose prompt fails."""
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=2, capacity=100, budget=48))
    first = scheduler.submit([5] * 4, max_new_tokens=3, stop=())
    while len(first.tokens) < 2:
        scheduler.step()
    scheduler.submit([5] * 4, max_new_tokens=6, stop=())
    monkeypatch.setattr(scheduler, "split", True)
    hook = model.model.layers[0].register_forward_hook(lambda _, given, out: 1 / 0 if out.shape[1] > 1 else None)
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    hook.remove()
    assert str(first.finished) == "length"
    assert not scheduler.busy
    assert not scheduler._queue._rank


def test_a_request_needs_memory_for_its_new_tokens_too(model: PreTrainedModel) -> None:
    batch = Batch(model, "oracle", max_seqs=2, capacity=100, budget=48, block_size=16)
    batch.join([5] * 4, max_new_tokens=2, stop=())
    batch.step()
    few, many = (batch.admission.need(batch.request([5] * 20, max_new_tokens=n)) for n in (10, 60))
    assert few > 0
    assert many / few == 80 / 32  # whole blocks


def test_a_step_that_has_changed_states_is_taken_again_by_way_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_exact("qwen3_next")
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((60, 9), (30, 12))]
    found = []
    for fails in (False, True):
        scheduler = Scheduler(Batch(model, "quest", max_seqs=2, capacity=100, budget=32, block_size=16))
        requests = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked]
        for step in range(60):
            if fails and step == 5:
                with monkeypatch.context() as patch:
                    patch.setattr(scheduler.batch.cache.kv.layers[-1], "decode", None)
                    with pytest.raises(TypeError):
                        scheduler.step()
            scheduler.step()
        assert not scheduler.busy
        found.append([one.tokens for one in requests])
    assert found[0] == found[1]


def test_what_a_scheduler_refuses(model: PreTrainedModel) -> None:
    batch = Batch(model, "oracle", max_seqs=1, capacity=100, budget=48)
    scheduler = Scheduler(batch, max_waiting=1)
    first = scheduler.submit([1, 2, 3], max_new_tokens=3, stop=())
    scheduler.step()
    scheduler.submit([1, 2, 3], max_new_tokens=3, stop=())
    with pytest.raises(QueueFullError, match="max_waiting is 1"):
        scheduler.submit([1, 2, 3])
    with pytest.raises(CacheError, match="request of its own"):
        Scheduler(batch)
    with pytest.raises(ConfigError, match="room for 100"):
        Scheduler(Batch(model, "oracle", max_seqs=1, capacity=100, budget=48)).submit([1] * 101)
    while scheduler.busy:
        scheduler.step()
    with pytest.raises(CacheError, match="not in the batch"):
        scheduler.cancel(first)


def test_any_order_of_events_gives_the_same_tokens(model: PreTrainedModel) -> None:
    """Requests come, are cancelled and end at random, with seeds and prompts' log-probabilities; each is as alone, none is lost."""
    rng = random.Random(5)
    for method in ("icecache", "clusterkv"):
        batch = Batch(model, method, max_seqs=3, capacity=200, prefill_chunk=48, **settings_of(method))
        scheduler, asked = Scheduler(batch, step_tokens=17), []
        for _ in range(60):
            if len(asked) < 8 and rng.random() < 0.3:
                ids = prompt(1, rng.choice((1, 20, 60, 140)), seed=len(asked))[0]
                scored = rng.choice((None, 2))
                sampling = Sampling(temperature=1.0, seed=len(asked), max_tokens=rng.randint(1, 20), prompt_logprobs=scored)
                asked.append((ids, sampling, scheduler.submit(ids, stop=(), sampling=sampling)))
            elif rng.random() < 0.04 and scheduler.busy:
                scheduler.cancel(rng.choice([*scheduler.waiting, *scheduler.prefilling, *scheduler.decoding]))
            scheduler.step()
        while scheduler.busy:
            scheduler.step()
        whole = Batch(model, method, max_seqs=len(asked), capacity=200, **settings_of(method))
        alone = [whole.join(ids, stop=(), sampling=sampling) for ids, sampling, _ in asked]
        while whole.requests:
            whole.step()
        for own, (_, _, request) in zip(alone, asked, strict=True):
            assert request.tokens == own.tokens[: len(request.tokens)]
            assert request.finished == "left" or request.finished == own.finished
            if request.prompt_logprobs:
                got = [score.logprob for score in request.prompt_logprobs[1:]]
                assert got == pytest.approx([score.logprob for score in own.prompt_logprobs[1:]], abs=1e-6)
        assert batch.stats().kv_host_bytes == 0


def test_a_request_that_was_made_before_can_be_submitted(model: PreTrainedModel) -> None:
    scheduler = Scheduler(Batch(model, "oracle", max_seqs=1, capacity=100, **settings_of("oracle")))
    made = scheduler.batch.request(prompt(1, 30)[0], max_new_tokens=4, stop=())
    assert not scheduler.busy, "it is in no batch"
    assert scheduler.submit(made) is made
    while scheduler.busy:
        scheduler.step()
    assert [made.tokens] == alone(model, "oracle", (prompt(1, 30)[0], 4))


@pytest.mark.gpu
@pytest.mark.parametrize(("memory", "streams"), [(None, True), ("auto", False)])
def test_earlier_rows_cross_the_bus_from_the_host_alone(memory: str | None, streams: bool) -> None:
    model = build("llama").to("cuda")
    batch = Batch(model, "quest", max_seqs=2, capacity=500, budget=48, block_size=16, prefill_chunk=100, device_memory=memory)
    request = batch.join(prompt(1, 300)[0], max_new_tokens=2, stop=())
    batch.prefill(request)
    assert ChunkLengths(batch, None).streams_back(request) == streams


@pytest.mark.parametrize("method", ["full", "pariskv-plus", "clusterkv-plus", "prkv"])
def test_a_request_that_leaves_costs_few_launches_a_layer(method: str) -> None:
    """The others wait for it. There were eight a layer and more."""
    deep = build("llama", num_hidden_layers=8)
    batch = Batch(
        deep, method, max_seqs=2, capacity=200, **({} if method == "full" else {"budget": 48, "device_memory": "1GiB"})
    )
    requests = [batch.join(prompt(1, 120)[0], max_new_tokens=20, stop=()) for _ in range(2)]
    while not requests[1].tokens:
        batch.step()
    with Launches() as launches:
        batch.leave(requests[0])
    assert launches.count <= 8 * 5


@torch.no_grad()
def test_a_long_prompt_that_comes_first_lets_a_short_one_by() -> None:
    """On a CPU, though nobody decodes when it begins."""
    model = build("llama", max_position_embeddings=4096)
    scheduler = Scheduler(Batch(model, "quest", max_seqs=2, capacity=4000, **settings_of("quest")))
    long = scheduler.submit(prompt(1, 3000)[0], max_new_tokens=1, stop=())
    scheduler.step()
    assert 0 < long.prefilled <= 512
    short = scheduler.submit([1, 2, 3, 4, 5], max_new_tokens=1, stop=())
    for _ in range(3):
        scheduler.step()
    assert short.tokens
    assert long.prefilled <= 1536


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    return build_exact("llama", max_position_embeddings=4096)


@pytest.mark.parametrize("max_seqs", [2, 3])
def test_long_prompts_leave_the_last_place_to_short_ones(deep: PreTrainedModel, max_seqs: int) -> None:
    scheduler = Scheduler(Batch(deep, "full", max_seqs=max_seqs, capacity=2400, **settings_of("full")))
    asked = [(prompt(1, 2300, seed=i)[0], 3) for i in range(max_seqs + 1)] + [(prompt(1, 9, seed=i)[0], 2) for i in range(2)]
    longs = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked[:-2]]
    scheduler.step()
    shorts = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked[-2:]]
    for _ in range(8):
        scheduler.step()
    assert all(one.finished for one in shorts)
    assert not any(one.tokens for one in longs)
    order = list[Request]()
    while scheduler.busy:
        order += [one for one in scheduler.step() if one.finished]
    assert order == longs, "none of them waits for those behind it"
    assert [one.tokens for one in (*longs, *shorts)] == alone(deep, "full", *asked, capacity=2400)


def test_a_long_prompt_that_is_known_gets_the_last_place(deep: PreTrainedModel) -> None:
    """So does one that is more urgent than the one that is read."""
    batch = Batch(deep, "full", max_seqs=2, capacity=2400, prefix_cache=PrefixCache(), **settings_of("full"))
    scheduler, known = Scheduler(batch), prompt(1, 1500, seed=5)[0]
    scheduler.submit(known, max_new_tokens=1, stop=())
    while scheduler.busy:
        scheduler.step()
    long = scheduler.submit(prompt(1, 2300, seed=6)[0], max_new_tokens=1, stop=())
    scheduler.step()
    again = scheduler.submit(known, max_new_tokens=1, stop=())
    for _ in range(2):
        scheduler.step()
    assert (again.finished, long.finished) == ("length", None)
    urgent = scheduler.submit(prompt(1, 1500, seed=7)[0], max_new_tokens=1, stop=(), priority=-1)
    scheduler.step()
    assert urgent.seq >= 0


@pytest.mark.parametrize(
    ("lengths", "first"), [([20, 20, 20, 20], [20, 20, 20, 0]), ([20, 50, 30], [20, 0, 30]), ([150, 9, 40], [0, 9, 40])]
)
def test_prompts_that_fit_into_the_rest_of_a_step_come_with_it(
    model: PreTrainedModel, lengths: list[int], first: list[int]
) -> None:
    """lengths: of prompts that come while another request decodes; first: their tokens that the next step brings."""
    scheduler = Scheduler(Batch(model, "full", max_seqs=5, capacity=200, **settings_of("full")), step_tokens=60)
    decoding = scheduler.submit(prompt(1, 30)[0], max_new_tokens=60, stop=())
    scheduler.step()
    asked = [(prompt(1, n, seed=n + i)[0], 3) for i, n in enumerate(lengths)]
    requests = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked]
    told = scheduler.step()
    assert [one.prefilled for one in requests] == first
    assert told == [decoding, *(one for one in requests if one.prefilled == one.prompt)]
    while not all(one.finished for one in requests):
        scheduler.step()
    assert [one.tokens for one in requests] == alone(model, "full", *asked)


@torch.no_grad()
def test_on_a_cpu_chunks_take_about_as_long_however_deep_they_are() -> None:
    """Attention to earlier tokens outweighs the weights of a small model soon; DEPTH is of a large one."""
    model = build("llama", max_position_embeddings=4096)
    depth = attention_depth(model)
    assert depth < 1000
    scheduler = Scheduler(Batch(model, "quest", max_seqs=2, capacity=4000, **settings_of("quest")))
    other = scheduler.submit([1, 2, 3, 4, 5], max_new_tokens=100, stop=())
    while not other.tokens:
        scheduler.step()
    long, ends = scheduler.submit(prompt(1, 3000)[0], max_new_tokens=1, stop=()), [0]
    while not long.finished and not other.finished:
        scheduler.step()
        ends.append(long.prefilled)
    for start, stop in pairwise(ends):
        assert stop - start <= max(32, 128 / (1 + start / depth))


def test_layers_of_different_head_dimensions_are_scheduled() -> None:
    model = build("gemma4")
    scheduler = Scheduler(Batch(model, "auto", max_seqs=2, capacity=100))
    request = scheduler.submit(prompt(1, 20)[0], max_new_tokens=2, stop=())
    while scheduler.busy:
        scheduler.step()
    assert len(request.tokens) == 2


def test_attention_outweighs_the_weights_of_an_8b_model_where_depth_says() -> None:
    config = SimpleNamespace(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: config), num_parameters=lambda: 8_030_000_000
    )
    assert attention_depth(model) == pytest.approx(DEPTH, rel=0.1)


def test_a_cpu_takes_fewer_tokens_of_a_large_model_at_a_time() -> None:
    sizes = [cpu_tokens(weights) for weights in (1, 10**8, 5 * 10**8, 10**9, 10**11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:2] == [512, 512]
    assert sizes[-1] == 128


@pytest.mark.parametrize("method", ["full", "oracle", "icecache-digest"])
def test_a_prompt_that_is_given_up_again_and_again_goes_on_from_where_it_was(model: PreTrainedModel, method: str) -> None:
    """Each try takes two steps and is cancelled; the tries after it begin with the whole blocks that those before had computed."""
    ids, how = prompt(1, 360)[0], settings_of(method) | {"block_size": 16}
    batch = Batch(model, method, max_seqs=2, capacity=400, prefill_chunk=40, prefix_cache=PrefixCache(host_bytes="1 GB"), **how)
    scheduler, cached = Scheduler(batch, step_tokens=40), []
    other = scheduler.submit(prompt(1, 20, seed=1)[0], max_new_tokens=300, stop=())
    while not other.tokens:
        scheduler.step()
    for _ in range(3):
        request = scheduler.submit(ids, max_new_tokens=4, stop=())
        for _ in range(2):
            scheduler.step()
        assert request.prefilled < len(ids)
        scheduler.cancel(request)
        cached.append(request.cached_tokens)
    request = scheduler.submit(ids, max_new_tokens=4, stop=())
    while request.finished is None:
        scheduler.step()
    assert cached[0] == 0 < cached[1] < cached[2] < request.cached_tokens
    assert request.tokens == alone(model, method, (ids, 4), capacity=400)[0]
    assert not request.error
