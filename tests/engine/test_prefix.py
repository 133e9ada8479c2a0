"""A prompt that begins like an earlier one prefills what is new, and gets the tokens of a fresh prefill."""

from __future__ import annotations

import functools
import gc
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import PreTrainedModel

import owners
from kvthaw import Batch, Cache, CacheError, PrefixCache, Request, Scheduler, attach
from kvthaw.cache.layer_base import LayerState
from kvthaw.engine.library import Library
from kvthaw.index.forest import TreeIndex
from zoo import KINDS, build, build_exact, prompt


@functools.cache
def shared_model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=3)


@pytest.fixture
def model() -> PreTrainedModel:
    return shared_model()


def settings_of(method: str) -> dict[str, Any]:
    return {"dense_layers": 1, "block_size": 32} | ({} if method == "full" else {"budget": 48})


def batch_of(model: PreTrainedModel, method: str, prefix: PrefixCache | None, **more: Any) -> Batch:
    return Batch(model, method, max_seqs=2, prefix_cache=prefix, **({"capacity": 500} | settings_of(method) | more))


def tokens_of(batch: Batch, ids: torch.Tensor, new: int = 4, **given: Any) -> tuple[list[int], int]:
    """The tokens of a request and how many of its prompt were cached."""
    scheduler = Scheduler(batch, step_tokens=100)
    request = scheduler.submit(ids, max_new_tokens=new, stop=(), **given)
    while scheduler.busy:
        scheduler.step()
    return request.tokens, request.cached_tokens


@pytest.mark.parametrize("method", KINDS)
def test_reuse_gives_the_tokens_of_a_fresh_prefill(model: PreTrainedModel, method: str) -> None:
    """After a document another question, and after the whole of an earlier prompt a longer one."""
    document, rest = prompt(1, 200)[0], prompt(1, 300, seed=3)[0]
    prompts = [
        torch.cat((document, rest[:30])),
        torch.cat((document, rest[100:])),
        torch.cat((document, rest[100:], rest[:90])),
    ]
    fresh = [tokens_of(batch_of(model, method, None), ids)[0] for ids in prompts]
    prefix = PrefixCache()
    batch = batch_of(model, method, prefix)
    found = [tokens_of(batch, ids) for ids in prompts]
    assert [tokens for tokens, _ in found] == fresh
    kind = batch.cache.settings.method
    refused = kind.prompt_queries is None
    assert [cached for _, cached in found] == ([0, 0, 0] if refused else [0, 200, 362])
    assert batch.stats().cached_tokens == prefix.stats().hits == sum(cached for _, cached in found)
    assert (prefix.stats().refused is not None) == refused
    assert batch.stats().kv_host_bytes == 0


def test_a_prefix_that_full_attention_took_stays_when_the_method_follows(model: PreTrainedModel) -> None:
    """Also before any token of the prompt has gone through the model."""
    ids, prefix = prompt(1, 300), PrefixCache()
    one, other = (Cache(model, "quest", full_below=400, budget=48, block_size=32) for _ in range(2))
    model(ids, past_key_values=one)
    prefix.keep(one.kv, ids[0])
    assert prefix.fill(other.kv, ids[0]) == 172
    rows = [layer.read(0, 0, 172).clone() for layer in other.kv.layers]
    other.kv.chooser.change("the test says so")
    assert all(torch.equal(layer.read(0, 0, 172), own) for layer, own in zip(other.kv.layers, rows, strict=True))


BLOCK = 3 * 32 * 2 * 2 * 16 * 8
"""Bytes of 32 tokens in all layers."""
DEVICE = 1_400_000
"""Bytes that leave room for some of the blocks."""


class Requests(RuleBasedStateMachine):
    """Requests whose prompts share prefixes come, go on, are cancelled; each gets the tokens of a batch of its own."""

    prompts: ClassVar[dict[str, list[int]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.model = shared_model()
        self.prefix = self.kept()
        self.batch = batch_of(self.model, "oracle", self.prefix, host_bytes=120 * BLOCK, device_memory=DEVICE)
        self.scheduler = Scheduler(self.batch, step_tokens=70)
        self.given: list[tuple[Request, torch.Tensor]] = []

    def kept(self) -> PrefixCache:
        return PrefixCache(host_bytes=40 * BLOCK)

    @rule(
        document=st.integers(0, 1),
        cuts=st.lists(st.integers(3, 7), min_size=1, max_size=2),
        salt=st.sampled_from(["", "", "a"]),
        name=st.sampled_from([None, "a", "b"]),
        priority=st.integers(0, 2),
    )
    def submit(self, document: int, cuts: list[int], salt: str, name: str | None, priority: int) -> None:
        for cut in cuts:
            ids = torch.cat((prompt(1, 210, seed=document)[0][: cut * 30], prompt(1, 140, seed=10 + cut % 2)[0]))
            how: dict[str, Any] = {"cache_salt": salt, "name": name, "priority": priority}
            self.given.append((self.scheduler.submit(ids, max_new_tokens=3, stop=(), **how), ids))

    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.scheduler.step()

    @precondition(lambda self: any(not request.finished for request, _ in self.given))
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        running = [request for request, _ in self.given if not request.finished]
        self.scheduler.cancel(running[which % len(running)])

    @rule()
    def drop(self) -> None:
        self.prefix.drop_oldest()

    @invariant()
    def owners_are_counted(self) -> None:
        swapped = [request.swapped for request, _ in self.given if request.swapped is not None]
        owners.check(owners.held([self.batch.cache.kv], self.prefix, swapped))

    @precondition(lambda self: any(request.finished == "length" for request, _ in self.given))
    @rule(which=st.integers(0, 20))
    def pin(self, which: int) -> None:
        done = [ids for request, ids in self.given if request.finished == "length"]
        with suppress(CacheError):  # some of it has been dropped since
            self.prefix._name(("", "document"), done[which % len(done)], "", None, lambda: True)

    def teardown(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()
        for request, ids in self.given:
            key = str(ids.tolist())
            if key not in self.prompts:
                self.prompts[key] = tokens_of(batch_of(self.model, "oracle", None), ids, 3)[0]
            assert request.tokens == self.prompts[key][: len(request.tokens)]
            assert request.finished == "left" or len(request.tokens) == 3
        stats = self.prefix.stats()
        memory = self.batch.cache.kv.streams.memory
        assert memory.used <= stats.kept_bytes <= 40 * BLOCK
        self.prefix.clear()
        assert memory.used == 0
        assert self.prefix.stats().kept_bytes == 0


@pytest.mark.parametrize("drops", [False, True])
def test_a_cache_that_is_reset_or_dropped_is_no_owner(model: PreTrainedModel, drops: bool) -> None:
    """Of kept blocks on the device: one that seems to have another owner never makes room."""
    prefix = PrefixCache()
    batch = batch_of(model, "oracle", prefix, device_memory=DEVICE)
    tokens_of(batch, prompt(1, 200)[0])
    request = batch.join(prompt(1, 230)[0])
    batch.prefill(request)
    batch.read()
    kept = list(owners.held([], prefix))
    assert max(block.owners for block in kept) > 1
    if drops:
        del batch, request
        gc.collect()
    else:
        batch.cache.reset()
    assert [block.owners for block in kept] == [1] * len(kept)


Requests.TestCase.settings = settings(max_examples=6, stateful_step_count=8)
TestRequests = Requests.TestCase


class FiledRequests(Requests):
    """The same, with a file that has room for some of what memory has not."""

    def kept(self) -> PrefixCache:
        return PrefixCache(host_bytes=10 * BLOCK, kv_dir=tempfile.gettempdir(), disk_bytes=20 * BLOCK)


FiledRequests.TestCase.settings = settings(max_examples=6, stateful_step_count=8)
TestFiledRequests = FiledRequests.TestCase


def test_blocks_go_to_the_host_and_are_dropped_where_others_need_their_memory(model: PreTrainedModel) -> None:
    """Oldest first; what is left is as good as ever."""
    prompts = [prompt(1, 330, seed=i)[0] for i in range(4)]
    fresh = [tokens_of(batch_of(model, "oracle", None), ids)[0] for ids in prompts]
    prefix = PrefixCache()
    batch = batch_of(model, "oracle", prefix, device_memory=DEVICE, host_bytes=33 * BLOCK)
    for ids, tokens in zip(prompts, fresh, strict=True):
        assert tokens_of(batch, ids) == (tokens, 0)
    assert batch.stats().moved_bytes
    assert 0 < prefix.stats().evicted_tokens < 660
    for ids, tokens in reversed([*zip(prompts, fresh, strict=True)]):
        found, cached = tokens_of(batch, ids)
        assert found == tokens
        assert cached == 202 or ids is prompts[0] or ids is prompts[1]


@pytest.mark.parametrize("method", ["full", "auto", "quest", "icecache-digest", "h2o"])
@torch.inference_mode()
def test_a_conversation_that_is_generated_turn_by_turn_prefills_what_is_new(model: PreTrainedModel, method: str) -> None:
    """With the tokens that it has without; a method that drops tokens says why it shares none."""
    turns = [prompt(1, 140, seed=seed) for seed in (1, 2, 3)]
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    padded = (torch.arange(140) >= torch.tensor([[30], [0]])).long()
    found, cached, prefix = list[list[int]](), list[int](), PrefixCache()
    for kept in (None, prefix):
        with attach(model, method, prefix_cache=kept, **settings_of(method)) as handle:
            ids = prompt(1, 50)
            for turn in turns:
                ids = model.generate(torch.cat((ids, turn), dim=1), **how)
                cached.append(handle.stats().cached_tokens)
                left = model.generate(torch.cat((turn, turn)), attention_mask=padded, **how)
                assert left.shape == (2, 145), "of other kinds of prompts nothing is taken"
            found.append(ids.tolist())
    assert found[0] == found[1]
    assert cached == ([0] * 6 if method == "h2o" else [0, 0, 0, 0, 190, 335])
    assert (prefix.stats().refused is not None) == (method == "h2o")


def test_a_tree_is_shared_where_little_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new tokens are inserted, as those of a next turn."""
    model = build_exact("llama", num_hidden_layers=3, max_position_embeddings=1024)
    ids, new = prompt(1, 800)[0], prompt(1, 60, seed=5)[0]
    question = torch.cat((ids[:790], new))
    prefix, built = PrefixCache(), list[int]()
    batch = batch_of(model, "icecache-digest", prefix, capacity=1000)
    tokens_of(batch, ids)
    build = TreeIndex.build

    def counted(index: TreeIndex, seq: int, *given: Any) -> None:
        built.append(seq)
        build(index, seq, *given)

    monkeypatch.setattr(TreeIndex, "build", counted)
    found = tokens_of(batch, question)
    assert found[1] == 850 - 128
    assert not built
    assert tokens_of(batch, question) == found
    tokens_of(batch, ids, name="document")
    library = Library(batch.cache, prefix, tmp_path)
    library.save("document")
    restored = batch_of(model, "icecache-digest", PrefixCache(), capacity=1000)
    assert restored.prefix_cache is not None
    Library(restored.cache, restored.prefix_cache, tmp_path).restore()
    assert tokens_of(restored, question) == found
    assert not built, "nor after a restart"
    fresh = tokens_of(batch_of(model, "icecache-digest", None, capacity=1000), question)
    assert found[0][0] == fresh[0][0]  # which no index has part in
    built.clear()
    tokens_of(batch, torch.cat((ids[:400], new, ids[:200])))
    assert built, "much of it is new"
    prefix.clear()
    assert prefix.stats().kept_bytes == 0


def test_no_tree_is_taken_where_what_is_kept_ends_before_its_first_position(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the step of another request met a tree of more positions than the sequence has rows."""
    ids, new = prompt(1, 140)[0], prompt(1, 5, seed=5)[0]
    batch = batch_of(model, "icecache-digest", PrefixCache(), budget=1024)  # of which 32 tokens are the sink
    tokens_of(batch, ids)
    other = batch.join(prompt(1, 90, seed=6)[0], max_new_tokens=20, stop=())
    while not other.tokens:
        batch.step()
    request = batch.join(torch.cat((ids, new)), max_new_tokens=2, stop=())
    while not request.finished:
        if request not in batch.decoding:
            batch.prefill(request, 16)
        batch.start()
        batch.decode()
    assert request.cached_tokens == 145 - 128
    assert not caplog.records


def test_under_another_adapter_a_prompt_has_its_own_rows_and_its_name(model: PreTrainedModel) -> None:
    prefix, adapter, ids = PrefixCache(host_bytes=1 << 26), [""], prompt(1, 300)[0]
    batch = batch_of(model, "quest", prefix)
    kv = batch.cache.kv
    kv.origin = lambda: adapter[0]
    tokens_of(batch, prompt(1, 200, seed=1)[0])
    adapter[0] = "another"
    tokens_of(batch, ids, name="book")
    entry = prefix.entry("book")
    path, _ = prefix._tree.match(entry.ids, entry.salt)
    blocks = {number: [held[node] for node in path] for number, held in prefix._kept.layers.items()}
    held = {number: (shape, LayerState(blocks[number])) for number, shape, *_ in prefix.content(kv, entry)}
    prefix.restore(kv, "again", prompt(1, 300, seed=2)[0], held)
    for seed in (0, 2):
        known = [prefix.known(kv, prompt(1, 300, seed=seed)[0])]
        adapter[0] = "" if adapter[0] else "another"
        known.append(prefix.known(kv, prompt(1, 300, seed=seed)[0]))
        assert sorted(known) == [0, 172]
    for name in ("book", "again"):
        prefix.forget(name)


def test_entries_with_a_name_stay(model: PreTrainedModel) -> None:
    prefix = PrefixCache(host_bytes=15 * BLOCK)
    batch = batch_of(model, "quest", prefix)
    ids, rest = prompt(1, 300)[0], prompt(1, 150, seed=1)[0]
    request = batch.request(ids, max_new_tokens=1, name="book")
    batch.prefill(batch.join(request))
    batch.read()
    assert prefix.stats().names == ["book"]
    for seed in range(3):
        tokens_of(batch, prompt(1, 310, seed=seed + 2)[0])
    assert prefix.stats().evicted_tokens
    assert torch.equal(prefix.entry("book").ids, ids)
    assert tokens_of(batch, torch.cat((ids, rest)))[1] == 300
    assert tokens_of(batch, torch.cat((ids, rest)), cache_salt="another tenant")[1] == 0
    large = batch.request(prompt(1, 400, seed=9)[0], max_new_tokens=1, name="second")
    batch.prefill(batch.join(large))
    batch.read()
    assert isinstance(large.error, CacheError)
    prefix.forget("book")
    with pytest.raises(CacheError, match="book"):
        prefix.entry("book")
    prefix.clear()
    assert prefix.stats().kept_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "memory"),
    [("full", None), *((name, size) for name in ("quest", "pariskv", "icecache-digest") for size in (None, DEVICE, 1 << 30))],
)
def test_reuse_on_a_gpu(method: str, memory: int | None) -> None:
    """From blocks on the host, on both, and on the device; steps are captured."""
    model = build("llama", num_hidden_layers=3).cuda()
    document, question = prompt(1, 300)[0], prompt(1, 140, seed=3)[0]
    ids = torch.cat((document, question))
    fresh = tokens_of(batch_of(model, method, None), ids)[0]
    batch = batch_of(model, method, PrefixCache(), **({} if memory is None else {"device_memory": memory}))
    tokens_of(batch, document)
    found, cached = tokens_of(batch, ids)
    assert cached == 300
    assert found[0] == fresh[0]
    assert tokens_of(batch, ids)[0] == found
