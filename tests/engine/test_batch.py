"""A running batch: requests that join and leave get the tokens that they would get alone, and nothing that a step reads moves."""

from __future__ import annotations

import pickle
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from counting import Launches
from kvthaw.cache import forward, passes
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.finite import FiniteCheck
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.config import CacheConfig
from kvthaw.engine.batch import Batch
from kvthaw.engine.graph_runner import StaticGraphs
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.engine.request import Request
from kvthaw.engine.sampling import Sampler, Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.errors import CacheError, ConfigError, TooLongError, UnsupportedModelError
from kvthaw.index import batches
from sampled import sample
from stand_in import StandIn, captured_by
from zoo import DISTINCT, build, build_exact, prompt

CAPACITY = 160
LENGTHS = [70, 5, 110, 33, 1, 90]
NEW = [12, 20, 9, 10, 6, 8]


@pytest.fixture
def llama() -> PreTrainedModel:
    """In float64: tokens of a batch are compared with those of rows alone."""
    return build_exact("llama")


def alone(model: PreTrainedModel, method: str, ids: torch.Tensor, new: int, **settings: Any) -> list[int]:
    """Tokens of a prompt by plain generate()."""
    with kvthaw.attach(model, method, **settings):
        return model.generate(ids[None], max_new_tokens=new, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()


def prefilled(batch: Batch, ids: torch.Tensor, **how: Any) -> Request:
    """A request whose prompt has come."""
    request = batch.join(ids, **how)
    batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()
    return request


def settings_of(method: str) -> dict[str, Any]:
    if method == "full":
        return {"dense_layers": 1}
    return {"budget": 48, "dense_layers": int(method in ("streaming", "h2o", "quest")), "block_size": 16}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_requests_move_to_lower_slots_when_others_have_left(in_blocks: bool) -> None:
    """With settings, draws, penalties and flags of their own, also in a window; a step then computes fewer slots."""
    model, rows = build_exact("gemma3"), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    blocks: dict[str, Any] = {"full_below": CAPACITY, "budget": 48, "block_size": 16, "device_memory": 1 << 20}
    method, settings = ("pariskv-plus", blocks) if in_blocks else ("full", {})
    samplings = [
        Sampling(temperature=1.0, seed=i, frequency_penalty=i / 4, repetition_penalty=1 + i / 8, logprobs=2) for i in range(8)
    ]
    lives = [4, 4, 3, 5, 3, 40, 2, 44]

    def serve(batch: Batch, which: list[int]) -> list[Request]:
        how = [{"max_new_tokens": lives[i], "sampling": samplings[i], "stop": ()} for i in which]
        requests = [batch.join(prompt(1, 20 + 9 * i, seed=i)[0], **one) for i, one in zip(which, how, strict=True)]
        while batch.prefilling:
            batch.prefill(batch.prefilling[0])
            batch.start(timeout=None)
        while batch.requests:  # launched before the tokens of the step before are read, as a scheduler on a GPU does
            batch.launch()
            batch.read(ahead=True)
        return requests

    batch = Batch(model, method, max_seqs=8, capacity=CAPACITY, **settings)
    together = serve(batch, list(range(8)))
    assert batch.cache.kv.moves
    assert [one.seq for one in together[5::2]] == [1, 0]
    assert rows[-20:] == [2] * 16 + [1] * 4
    for i, request in enumerate(together):
        (single,) = serve(Batch(model, method, max_seqs=1, capacity=CAPACITY, **settings), [i])
        assert request.tokens == single.tokens, i
        assert [one.token for one in request.logprobs] == [one.token for one in single.logprobs]


@pytest.mark.parametrize("method", ["full", "h2o", "icecache-digest:reuse=3", "clusterkv"])
def test_joining_and_leaving_changes_nobodys_tokens(llama: PreTrainedModel, method: str) -> None:
    rng, settings = random.Random(7), settings_of(method)
    prompts = [prompt(1, n, seed=i)[0] for i, n in enumerate(LENGTHS)]
    batch = Batch(llama, method, max_seqs=2, capacity=CAPACITY, **settings)
    joined: list[tuple[int, Request]] = []
    addresses: list[int] = []
    while len(joined) < len(prompts) or batch.requests:
        while batch.free and len(joined) < len(prompts) and (not batch.requests or rng.random() < 0.4):
            i = len(joined)
            joined.append((i, batch.join(prompts[i], max_new_tokens=NEW[i], stop=())))
        for request in batch.step():
            assert request.finished or request in batch.requests
        if batch.requests and rng.random() < 0.05:
            batch.leave(rng.choice(batch.requests))
        now = [t.data_ptr() for t in batch.cache.kv.tensors()]
        if all(layer.retriever is None or layer.retriever.index.traits.graph_safe for layer in batch.cache.kv.offloaded):
            assert not addresses or now == addresses, "a tensor moved, on which a capture depends"
        addresses = now if any(one.fed for _, one in joined) else []  # they are there when the first token has been decoded
    assert len({one.seq for _, one in joined}) == 2
    assert {one.finished for _, one in joined} == {"length", "left"}
    for i, one in joined:
        assert one.tokens == alone(llama, method, prompts[i], NEW[i], **settings)[: len(one.tokens)], f"prompt {i}"
        assert one.finished == "left" or len(one.tokens) == NEW[i]


AGAIN = [name for name in DISTINCT if name != "snapkv-refreshed"] + ["snapkv:refresh=24", "snapkv:refresh=4"]


@pytest.mark.parametrize(
    ("method", "first", "second"), [(method, *((60, 5), (5, 60))[turn % 2]) for turn, method in enumerate(AGAIN)]
)
def test_a_step_computes_the_sequences_up_to_the_last_that_decodes(method: str, first: int, second: int) -> None:
    model, rows = build_exact("llama", num_hidden_layers=1), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))

    def serve(batch: Batch, *lengths: int) -> list[list[int]]:
        """Tokens of requests that join together; each leaves some steps before the one in the place before it."""
        requests = []
        for i, length in enumerate(lengths):
            sampling = Sampling(temperature=1.0, seed=length)  # greedy tokens repeat themselves and hide what was attended to
            requests.append(batch.join(prompt(1, length, seed=length)[0], max_new_tokens=8 - 2 * i, stop=(), sampling=sampling))
        while batch.requests:
            batch.step()
        return [request.tokens for request in requests]

    settings = {"dense_layers": 1} if method == "full" else {"budget": 32, "dense_layers": 0, "block_size": 16}
    batch = Batch(model, method, max_seqs=3, capacity=CAPACITY, **settings)
    together = serve(batch, first, second, 33)
    assert set(rows) == {1, 2, 3}
    alone = [serve(batch, length)[0] for length in (second, 33)]  # nothing stays of those before
    assert together[1:] == [alone[0][:6], alone[1][:4]]
    assert serve(batch, 33, first) == [alone[1], together[0][:6]]


@pytest.mark.parametrize("method", ["full", "streaming", "oracle", "clusterkv", "h2o", "icecache-digest"])
def test_a_prompt_in_chunks_equals_one_pass(llama: PreTrainedModel, method: str) -> None:
    settings, ids = settings_of(method), prompt(1, 110)[0]
    batch = Batch(llama, method, max_seqs=2, capacity=CAPACITY, prefill_chunk=32, **settings)
    other = batch.join(prompt(1, 60, seed=1)[0], max_new_tokens=12, stop=())
    batch.step()
    request = batch.join(ids, max_new_tokens=12, stop=())
    while batch.requests:
        batch.step()
    assert request.tokens == alone(llama, method, ids, 12, **settings)
    assert other.tokens == alone(llama, method, prompt(1, 60, seed=1)[0], 12, **settings)


@pytest.mark.parametrize(("method", "again"), [("thaw", False), ("pariskv-plus", False), ("clusterkv-plus", True)])
def test_codes_of_a_joining_prompt_come_with_its_last_chunk(
    llama: PreTrainedModel, method: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the rows that attention read, so that they cross the bus once. Clusters take longer, between two steps of the others."""
    read, rebuild = list[int](), IndexUpdater.rebuild

    def counted(self: IndexUpdater, seq: int, end: int) -> None:
        read.append(seq)
        rebuild(self, seq, end)

    monkeypatch.setattr(IndexUpdater, "rebuild", counted)
    settings = settings_of(method)
    batch = Batch(llama, method, max_seqs=2, capacity=CAPACITY, **settings)
    prompts = [prompt(1, length)[0] for length in (90, 110)]
    first = prefilled(batch, prompts[0], max_new_tokens=12, stop=())
    second = batch.join(prompts[1], max_new_tokens=8, stop=())
    read.clear()
    for _ in range(3):
        batch.prefill(second, 40)
        batch.launch()
        batch.read()
    batch.start()
    assert bool(read) == again
    while batch.requests:
        batch.step()
    assert first.tokens == alone(llama, method, prompts[0], 12, **settings)
    assert second.tokens == alone(llama, method, prompts[1], 8, **settings)


def test_a_draw_is_the_same_in_any_company(llama: PreTrainedModel) -> None:
    warm = Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=3)
    kinds = [warm, Sampling(temperature=1.2, seed=4), Sampling(), Sampling(temperature=0.8, seed=5)]
    found = []
    for seqs in (1, 3):
        batch = Batch(llama, "oracle", max_seqs=seqs, capacity=CAPACITY, budget=48)
        waiting = [(prompt(1, 20 + i, seed=i)[0], kinds[i]) for i in range(4)]
        requests = []
        while waiting or batch.requests:
            while waiting and batch.free:
                ids, how = waiting.pop(0)
                requests.append(batch.join(ids, max_new_tokens=8, stop=(), sampling=how))
            batch.step()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert found[0][2] == alone(llama, "oracle", prompt(1, 22, seed=2)[0], 8, budget=48)
    assert found[0][0] != found[0][3]


def test_stop_tokens_and_limits(llama: PreTrainedModel) -> None:
    ids = prompt(1, 30)[0]
    free = alone(llama, "oracle", ids, 12, budget=48)
    batch = Batch(llama, "oracle", max_seqs=2, capacity=42, budget=48)
    request = batch.join(ids.tolist(), stop=free[4])
    assert request.spec.limit == 12
    while batch.requests:
        batch.step()
    assert request.tokens == free[: free.index(free[4]) + 1]
    assert request.finished == "stop"
    once = batch.join(ids, max_new_tokens=1, stop=())
    assert (once.tokens, batch.free) == ([], 1)
    assert batch.step() == [once]
    assert (once.tokens, once.finished, batch.free) == (free[:1], "length", 2)
    llama.generation_config.eos_token_id = [free[2]]
    assert batch.join(ids).spec.stop == {free[2]}


def test_an_empty_sequence_is_attended_by_nobody(llama: PreTrainedModel) -> None:
    """It has no rows, its attention is 0, and it does not count."""
    batch = Batch(llama, "oracle", max_seqs=3, capacity=CAPACITY, budget=48)
    first, request = (prefilled(batch, prompt(1, 90)[0], stop=()) for _ in range(2))
    batch.leave(first)
    seen = []
    batch.cache.kv.streams.observers.append(lambda layer, query, choice: seen.append(choice.selection.counts))
    batch.step()
    assert all(counts[request.seq].min() > 0 and counts[first.seq].max() == 0 for counts in seen)
    assert batch.stats().attended_mean == 48 - 6 + 1 == alone_stats(llama, 90).attended_mean
    heads = [torch.randn(3, n, 1, 16, dtype=torch.float64) for n in (4, 2, 2)]
    out = batch.cache.kv.attend(batch.cache.kv.layers[0], *heads, AttentionParams(0.25))
    assert (out[[0, 2]] == 0).all()
    assert (out[1] != 0).all()


def alone_stats(model: PreTrainedModel, tokens: int) -> kvthaw.Stats:
    with kvthaw.attach(model, "oracle", budget=48) as handle:
        model.generate(prompt(1, tokens), max_new_tokens=2, do_sample=False)
        return handle.stats()


def test_an_error_of_a_long_prompt_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(TooLongError(60, None, 64)))
    assert (str(error), error.wanted) == (str(TooLongError(60, None, 64)), None)
    assert isinstance(error, TooLongError)


def test_a_prompt_that_fails_leaves_the_batch_as_it_was(llama: PreTrainedModel) -> None:
    ids, other = prompt(1, 60, seed=1)[0], prompt(1, 80, seed=2)[0]
    for method in ("oracle", "icecache-digest"):
        expected = alone(llama, method, ids, 20, budget=48)
        batch = Batch(llama, method, max_seqs=2, capacity=CAPACITY, budget=48)
        request = batch.join(ids, max_new_tokens=20, stop=())
        for _ in range(5):
            batch.step()
        weight = llama.model.layers[1].self_attn.k_proj.weight.data
        kept = weight.clone()
        weight.fill_(torch.nan)
        lost = batch.join(other)
        with pytest.raises(CacheError, match="not finite"):
            batch.prefill(lost)
        weight.copy_(kept)
        assert (batch.free, lost.finished, lost.tokens) == (1, None, [])
        batch.join(other, stop=())
        while request in batch.requests:
            batch.step()
        assert request.tokens == expected


@pytest.mark.parametrize(
    ("method", "then"),
    [("full", "join"), ("quest", "leave"), ("icecache-digest", "again"), ("icecache", "join"), ("streaming", "leave")],
)
def test_a_step_that_breaks_off_between_layers_is_taken_again(method: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens that there would have been; also where a request joins or leaves before that."""
    llama, found = build_exact("llama", num_hidden_layers=3), []
    for fails in (False, True):
        batch = Batch(llama, method, max_seqs=3, capacity=200, **settings_of(method))
        requests = [prefilled(batch, prompt(1, n)[0], max_new_tokens=20, stop=()) for n in (90, 60)]
        for step in range(19):
            if fails and step % 4 == 2:
                layer = batch.cache.kv.layers[step % 3]
                with monkeypatch.context() as patch:
                    patch.setattr(layer, "decode", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        batch.step()
            if step % 4 == 2 and step < 16 and then == "join":  # before the step is taken again, whether rings were full or not
                requests.append(prefilled(batch, prompt(1, 30)[0], max_new_tokens=1 + step % 3, stop=()))
            if step == 10 and then == "leave":
                batch.leave(requests[1])
            batch.step()
        found.append([request.tokens for request in requests])
        assert not batch.requests
    assert found[0] == found[1]


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_what_a_batch_refuses(llama: PreTrainedModel) -> None:
    for wrong, message in (
        ({"max_seqs": 0}, "max_seqs is 0; it must be at least 1"),
        ({"capacity": 513}, "capacity is 513; the model's positions end at 512"),
        ({"budget": 0.1}, "budget is 0.1; a batch needs a number of tokens"),
        ({"retrieved": 0.1}, "retrieved is 0.1; a batch needs a number of tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            Batch(llama, "oracle", **{"max_seqs": 2, "capacity": 64, **wrong})
    longrope = build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="longest row"):
        Batch(longrope, "oracle", max_seqs=2, capacity=64)
    with kvthaw.attach(llama, "oracle"), pytest.raises(CacheError, match="attached"):
        Batch(llama, "oracle", max_seqs=2, capacity=64)
    batch = Batch(llama, "oracle", max_seqs=1, capacity=64, budget=48)
    assert batch.step() == []
    with pytest.raises(ConfigError, match="the prompt is empty"):
        batch.join([])
    with pytest.raises(ConfigError, match="a request has no option 'max_tokens'; there are max_new_tokens, stop, "):
        batch.join(prompt(1, 9)[0], max_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="the prompt is text, 'What is the pass key'; it must be token ids"):
        batch.join("What is the pass key?")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="60 tokens and max_new_tokens is 5; a sequence has room for 64"):
        batch.join(prompt(1, 60)[0], max_new_tokens=5)
    words = llama.config.vocab_size
    for ids, least, most in (([1, words], 1, words), ([-1, 3], -1, 3)):
        with pytest.raises(ConfigError, match=f"token ids from {least} to {most}; the model's are 0 to {words - 1}"):
            batch.join(ids)
    request = batch.join(prompt(1, 60)[0])
    with pytest.raises(CacheError, match="all 1 sequences are taken"):
        batch.join([1])
    batch.leave(request)
    assert request.finished == "left"
    with pytest.raises(CacheError, match="not in the batch"):
        batch.leave(request)
    for name, value in (("temperature", -1), ("top_k", 0), ("top_p", 0.0)):
        with pytest.raises(ConfigError, match=name):
            Sampling(**{name: value})


def test_draws_follow_their_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(4000, 4)
    place = torch.arange(4000)
    found = sample(logits, [Sampling(temperature=2.0)] * 4000, place).bincount(minlength=4) / 4000
    assert torch.allclose(found, torch.softmax(logits[0] / 2, dim=0), atol=0.03)
    found = sample(logits, [Sampling(temperature=1.0, top_k=2)] * 4000, place).bincount(minlength=4) / 4000
    assert torch.allclose(found, torch.tensor([0, 0.269, 0.731, 0]), atol=0.03)
    assert set(sample(logits, [Sampling(temperature=1.0, top_p=0.6)] * 4000, place).tolist()) == {2}


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_queries_are_predicted_by_layers_that_turn_them_alike(name: str) -> None:
    """Not by those that keep a window, which are the batch's own here and transformers' where the model is attached."""
    model, ids = build_exact(name), prompt(1, 150, seed=3)
    settings: dict[str, Any] = {"budget": 32, "dense_layers": 0}
    with kvthaw.attach(model, "icecache-digest:prefetch=True", **settings):
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 150:].tolist()
    batch = Batch(model, "icecache-digest:prefetch=True", max_seqs=1, capacity=CAPACITY, **settings)
    request = batch.join(ids[0], max_new_tokens=8, stop=())
    while batch.requests:
        batch.step()
    assert request.tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method", [name for name in kvthaw.METHODS if name not in ("icecache", "icecache-reuse", "icecache-digest", "infinigen")]
)
def test_one_capture_serves_every_company(method: str) -> None:
    llama = build("llama", max_position_embeddings=4096).to("cuda")
    settings = {} if method == "full" else {"budget": 128, "block_size": 64}
    prompts = [prompt(1, n, seed=i)[0].cuda() for i, n in enumerate([700, 90, 1500, 300, 40])]
    expected = [alone(llama, method, ids, 60, capture=False, **settings) for ids in prompts]
    batch = Batch(llama, method, max_seqs=3, capacity=2048, **settings)
    requests, waiting = [], list(prompts)
    while waiting or batch.requests:
        if waiting and batch.free:
            requests.append(batch.join(waiting.pop(0), max_new_tokens=60, stop=()))
        for _ in range(7):
            batch.step()
    assert [request.tokens for request in requests] == expected
    stats = batch.stats()
    assert stats.captures == 3  # of one, two and three sequences
    assert stats.capture_seconds > 0


def test_the_addresses_of_dropped_blocks_are_gone_before_a_step_is_captured(llama: PreTrainedModel) -> None:
    """Else each replay of the capture that follows would write them to the table, whoever has the place by then."""
    batch = Batch(llama, "quest", max_seqs=2, capacity=CAPACITY, device_memory=1 << 20, **settings_of("quest"))
    requests = [prefilled(batch, prompt(1, 60, seed=n)[0], max_new_tokens=n, stop=()) for n in (3, 9)]
    while not requests[0].finished:
        batch.step()
    batch.cache.kv.finish_clear()
    for layer in batch.cache.kv.offloaded:
        assert layer.storage.tabled
        assert not layer.store.table.changes(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv", "quest"])
@pytest.mark.parametrize("memory", [None, 1 << 30])
def test_a_step_is_captured_when_another_request_has_just_left(method: str, memory: int | None) -> None:
    """A third gets its place, and steps replay what was captured."""
    model = build("llama").to("cuda")
    how: dict[str, Any] = {"capacity": CAPACITY, "budget": 48, "block_size": 16, "device_memory": memory}
    ids = [prompt(1, n, seed=n)[0].cuda() for n in (120, 30, 125)]
    expected = [alone(model, method, own, 12, capture=False, budget=48, block_size=16) for own in ids]
    for new in range(2, 8):
        batch = Batch(model, method, max_seqs=2, **how)
        first = prefilled(batch, ids[0], max_new_tokens=new, stop=())
        second = prefilled(batch, ids[1], max_new_tokens=12, stop=())
        while not first.finished:
            batch.step()
        third = prefilled(batch, ids[2], max_new_tokens=12, stop=())
        assert third.seq == 0
        while batch.requests:
            batch.step()
        assert [second.tokens, third.tokens] == expected[1:], new


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "quest", "pariskv"])
@pytest.mark.parametrize("architecture", ["gemma3", "olmo3"])
def test_windows_are_captured_with_the_other_layers(architecture: str, method: str) -> None:
    model = build(architecture, max_position_embeddings=4096).to("cuda")
    settings = {} if method == "full" else {"budget": 128, "block_size": 64}
    prompts = [prompt(1, n, seed=n)[0].cuda() for n in (700, 20, 300)]
    found = []
    for capture in (False, True):
        batch = Batch(model, method, max_seqs=2, capacity=1024, capture=capture, **settings)
        scheduler = kvthaw.Scheduler(batch, step_tokens=256)
        requests = [scheduler.submit(ids, max_new_tokens=60, stop=()) for ids in prompts]
        while scheduler.busy:
            scheduler.step()
        found.append([request.tokens for request in requests])
        assert batch.stats().captures == 2 * capture  # of one sequence and of two
    assert found[0] == found[1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_capacity_that_nobody_uses_takes_no_host_memory() -> None:
    """On a CPU: a server of long requests starts at once."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    batch = Batch(build("llama", num_hidden_layers=1, max_position_embeddings=131072), "full", max_seqs=8, capacity=131072)
    before = resident()
    batch.prefill(batch.join([1, 2, 3], max_new_tokens=4))
    batch.step()
    data = batch.cache.kv.layers[0].tensors()[0]
    assert data.nbytes > 128 << 20
    assert resident() - before < data.nbytes // 4


def test_a_step_says_when_it_is_on_its_way(llama: PreTrainedModel) -> None:
    """Once a step, when its tokens are not there yet."""
    batch, seen = Batch(llama, "oracle", max_seqs=2, capacity=100, budget=48), list[int]()
    request = batch.join([1, 2, 3], max_new_tokens=4, stop=())
    batch.launched = lambda: seen.append(len(request.tokens))
    while batch.requests:
        batch.step()
    assert seen == [1, 2, 3]


def test_a_request_that_ends_is_dropped_behind_coming_steps(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all layers hold of it takes the host milliseconds to drop, which the device would wait for."""
    done: list[str] = []
    monkeypatch.setattr(forward, "_CLEARS", 1)
    real = OffloadedLayer.clear
    monkeypatch.setattr(OffloadedLayer, "clear", lambda self, seq: (done.append("clear"), real(self, seq)))
    monkeypatch.setattr(StandIn, "replay", lambda self: done.append("replay"))
    captured_by(monkeypatch, StandIn)
    batch = Batch(llama, "clusterkv", max_seqs=3, capacity=CAPACITY, budget=48, dense_layers=0, block_size=16)
    batch.cache.replay = StaticGraphs(llama.forward, batch.cache)
    for seq, new in enumerate((8, 12, 16)):
        prefilled(batch, prompt(1, 90, seed=seq)[0], max_new_tokens=new, stop=())
    layers, held = batch.cache.kv.offloaded, list[int]()

    def step() -> list[str]:
        done.clear()
        batch.step()
        held.append(layers[0].store.nbytes())
        return list(done)

    every = ["clear"] * len(layers)
    steps = [step() for _ in range(11)]
    assert len(layers) == 2
    assert steps[6:9] == [["replay"], ["replay", "clear"], ["replay", "clear"]], "some layers behind each"
    assert held[7] < held[6]
    assert steps[9] == steps[10] == ["replay"]
    assert len(batch.requests) == 1
    batch.admission.fits(batch.request([1, 2, 3]), batch.requests)
    assert done == ["replay", *every], "and before anything else, such as a look at what memory is free"
    batch.leave(batch.requests[0])
    assert done == ["replay", *every, *every]
    assert step() == []
    prefilled(batch, prompt(1, 90)[0], max_new_tokens=3, stop=())
    assert [step() for _ in range(2)] == [[], every], "no step is to come"
    assert held[-1] == 0


def test_a_step_after_a_prompt_asks_nothing_of_the_layers(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ready when the first token is drawn."""
    asked: list[OffloadedLayer] = []
    real = OffloadedLayer.before_step
    monkeypatch.setattr(OffloadedLayer, "before_step", lambda self: (asked.append(self), real(self)))
    captured_by(monkeypatch, StandIn)
    batch = Batch(llama, "clusterkv", max_seqs=2, capacity=CAPACITY, budget=48, dense_layers=0, block_size=16)
    batch.cache.replay = StaticGraphs(llama.forward, batch.cache)
    prefilled(batch, prompt(1, 90)[0], max_new_tokens=40, stop=())
    for _ in range(4):
        batch.step()
    for _ in range(2):
        second = prefilled(batch, prompt(1, 70)[0], max_new_tokens=6, stop=())
        for _ in range(2 if batch.cache.replay.captures < 2 else 0):
            batch.step()  # eager
        asked.clear()
        batch.step()
        assert not asked
        while not second.finished:
            batch.step()


@pytest.mark.parametrize("method", ["full", "quest", "clusterkv"])
def test_the_host_goes_on_with_a_prompt_while_a_step_is_under_way(
    llama: PreTrainedModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no copy where a prompt joins, and for the prompt once its token is being drawn and the next step prepared."""
    told, wait, end, draw, prepare = list[str](), HostStore.wait, FiniteCheck.end, Sampler.__call__, StaticGraphs.prepare
    for owner, name, done in (
        (HostStore, "wait", wait), (FiniteCheck, "end", end), (Sampler, "__call__", draw), (StaticGraphs, "prepare", prepare),
    ):  # fmt: skip

        def noted(*args: Any, own: Any = done, name: str = name) -> Any:
            told.append(name)
            return own(*args)

        monkeypatch.setattr(owner, name, noted)
    batch = Batch(llama, method, max_seqs=2, capacity=CAPACITY, **settings_of(method))
    prefilled(batch, prompt(1, 70)[0], max_new_tokens=12, stop=())
    batch.launch()
    told.clear()
    request = batch.join(prompt(1, 40)[0], max_new_tokens=3, stop=())
    assert not told
    batch.prefill(request)
    batch.read(ahead=True)
    assert "wait" not in told
    batch.read()
    monkeypatch.undo()
    waits = told.index("end", told.index("__call__"))  # on a CPU a chunk's check ends at once, too
    assert told.index("prepare") < waits
    assert "wait" not in told[:waits]
    while batch.requests:
        batch.step()
    assert request.tokens == alone(llama, method, prompt(1, 40)[0], 3, **settings_of(method))


def test_a_first_token_is_drawn_before_clusters_are_formed(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rings of the others are full or not: the device draws it while the host launches what clusters take."""
    told, form, draw = list[str](), batches.form, Sampler.__call__
    how: dict[str, Any] = {"budget": 48, "dense_layers": 0, "block_size": 16}
    batch = Batch(llama, "clusterkv-plus", max_seqs=2, capacity=CAPACITY, **how)
    prefilled(batch, prompt(1, 70)[0], max_new_tokens=60, stop=())
    while not batch.cache.kv.sequences.full():
        batch.step()
    monkeypatch.setattr(batches, "form", lambda *args, **given: (told.append("form"), form(*args, **given)))
    monkeypatch.setattr(Sampler, "__call__", lambda *args: (told.append("draw"), draw(*args))[1])
    request = batch.join(prompt(1, 40)[0], max_new_tokens=3, stop=())
    batch.prefill(request)
    batch.launch()
    assert told[:2] == ["draw", "form"]
    while not request.finished:
        batch.step()
    monkeypatch.undo()
    assert request.tokens == alone(llama, "clusterkv-plus", prompt(1, 40)[0], 3, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "pariskv-plus", "clusterkv-plus"])
def test_a_prompt_joins_without_a_wait_for_the_device(method: str) -> None:
    settings = {} if method == "full" else {"budget": 128, "block_size": 64}
    batch = Batch(build("llama", max_position_embeddings=4096).to("cuda"), method, max_seqs=2, capacity=2048, **settings)
    prefilled(batch, prompt(1, 700)[0], max_new_tokens=60, stop=())
    for _ in range(40):
        batch.step()
        request = batch.request(prompt(1, 40)[0], max_new_tokens=3, stop=())
        batch.launch()
        try:
            torch.cuda.set_sync_debug_mode("error")
            batch.join(request)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        batch.read()
        batch.leave(request)


def test_a_plan_takes_effect_with_the_tokens_that_it_is_of_whoever_joins(llama: PreTrainedModel) -> None:
    """A ring flushed beside a step begins PRKV's next plan; a prompt that joins before the next step does not hurry it."""
    how: dict[str, Any] = {"capacity": 400, "budget": 16, "block_size": 16, "prefill_chunk": 400}
    batch, alone = Batch(llama, "prkv:interval=16", max_seqs=2, **how), Batch(llama, "prkv:interval=16", max_seqs=1, **how)
    ids = prompt(1, 147, seed=3)[0]
    batch.join(prompt(1, 1, seed=1)[0], max_new_tokens=29, stop=())
    batch.step()
    request = batch.join(ids, max_new_tokens=100, stop=())
    for _ in range(60):
        batch.step()
        if batch.free:  # one joins beside every step
            batch.join(prompt(1, 1, seed=2)[0], max_new_tokens=1, stop=())
    own = alone.join(ids, max_new_tokens=100, stop=())
    for each in (batch, alone):
        while each.requests:
            each.step()
    assert request.tokens == own.tokens


def test_a_prompt_that_is_whole_comes_no_further(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its index is being built; the first token was to be chosen from no logits at all."""
    batch, ids = Batch(llama, "icecache-digest", max_seqs=2, capacity=CAPACITY, budget=48), prompt(1, 60)[0]
    with monkeypatch.context() as slow:
        slow.setattr(batch.cache.kv, "built", lambda *_, **__: False)
        request = batch.join(ids, max_new_tokens=5, stop=())
        batch.prefill(request)
        batch.prefill(request)
        assert not batch.read()
    batch.start(timeout=None)
    while not request.finished:
        batch.step()
    assert request.tokens == alone(llama, "icecache-digest", ids, 5, budget=48)


def test_steps_of_a_batch_that_may_outgrow_the_device_wait_for_blocks_that_moved(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the host launches a step without a look at each layer."""
    captured_by(monkeypatch, StandIn)
    how: dict[str, Any] = {"full_below": CAPACITY, "budget": 48, "block_size": 16, "device_memory": 1 << 19}
    batch, looks, renew = Batch(llama, "pariskv-plus", max_seqs=8, capacity=CAPACITY, **how), list[int](), passes.renew
    batch.cache.replay = StaticGraphs(llama.forward, batch.cache)
    kv = batch.cache.kv
    for seq in range(2):
        prefilled(batch, prompt(1, 50, seed=seq)[0], max_new_tokens=100, stop=())
    for _ in range(6):
        batch.step()
    assert kv.streams.device.spills
    assert kv.chooser.in_blocks
    monkeypatch.setattr(passes, "renew", lambda *given: (looks.append(1), renew(*given)))
    for _ in range(40):
        batch.step()
    assert looks == []
    for changed, found in ((3, []), (1, [1])):  # nobody's blocks; blocks that a step reads
        kv.offloaded[-1].store.table.changed(changed)
        batch.step()
        assert looks == found
    assert not kv.offloaded[-1].store.table.lacks(kv.sequences.idle)


def test_requests_that_start_together_cost_the_host_as_much_as_one(llama: PreTrainedModel) -> None:
    """Their first tokens are drawn and copied together."""
    found = []
    for together in (1, 6):
        batch = Batch(llama, "full", max_seqs=8, capacity=CAPACITY)
        requests = [batch.join(prompt(1, 40 + seq, seed=seq)[0], max_new_tokens=8, stop=()) for seq in range(together)]
        for request in requests:
            batch.prompts.prefill(request, None)
        with Launches() as launches:
            batch.start(None)
        found.append(launches.count)
        batch.read()
        assert all(len(request.tokens) == 1 for request in requests)
    assert found[1] <= found[0] + 6, "what a table of settings and the logits take"


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_move_that_fails_for_memory_changes_nothing(
    llama: PreTrainedModel, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second layer, after the first has been copied. The next step moves the requests."""
    blocks: dict[str, Any] = {"full_below": CAPACITY, "budget": 48, "block_size": 16, "device_memory": 1 << 20}
    method, settings = ("pariskv-plus", blocks) if in_blocks else ("full", {})
    kind, moved = OffloadedLayer if in_blocks else DenseLayer, list[int]()
    real = kind.copy_slots

    def copy_slots(self: Any, moves: Any) -> None:
        moved.append(self.number)
        if len(moved) == 2:
            raise torch.OutOfMemoryError("no memory")
        real(self, moves)

    monkeypatch.setattr(kind, "copy_slots", copy_slots)
    batch, lives = Batch(llama, method, max_seqs=8, capacity=CAPACITY, **settings), [4, 4, 3, 5, 3, 40, 2, 44]
    scheduler = Scheduler(batch)
    ids = [prompt(1, 20 + 9 * i, seed=i)[0] for i in range(8)]
    requests = [scheduler.submit(own, max_new_tokens=new, stop=()) for own, new in zip(ids, lives, strict=True)]
    while scheduler.busy:
        scheduler.step()
    assert len(moved) > 2
    for request, own, new in zip(requests, ids, lives, strict=True):
        assert request.tokens == alone(llama, method, own, new, **settings)


def test_slots_that_requests_have_left_are_no_longer_there_after_the_method_follows(llama: PreTrainedModel) -> None:
    """Flags of the former slots are cleared as requests move, since no layer has them once there are fewer slots."""
    settings: dict[str, Any] = {"capacity": 512, "dense_layers": 1, "block_size": 16, "budget": 4096}
    one = sequence_bytes(llama, "oracle", 512, CacheConfig.split(settings)[0])
    batch = Batch(llama, "oracle", max_seqs=8, **settings, full_below=100, device_memory=9 * one // 2)
    scheduler = Scheduler(batch, step_tokens=512)
    requests = [scheduler.submit(prompt(1, 40, seed=i)[0], max_new_tokens=100 - 3 * i if i else 3, stop=()) for i in range(5)]
    counts = set[int]()
    while scheduler.busy:
        scheduler.step()
        counts.add(batch.max_seqs)
    assert counts == {8, 4}
    assert [request.finished for request in requests] == ["length"] * 5
