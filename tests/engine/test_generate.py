"""What generate() can do, at full budget token for token as with DynamicCache, and below it consistent with itself."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, pipeline

import kvthaw
from kvthaw.methods import resolve
from zoo import KINDS, ROLLS_BACK_SLIDING, VOCAB, build, build_exact, prompt, ragged

METHODS = ("oracle", "icecache-digest", "icecache-digest:reuse=3")
FORKED = (*KINDS, "infinigen", "shadowkv", "twilight")
"""One of each kind, and those that need more of a layer than its keys. Indexes alone are cloned by the contract of methods."""
AMPLE = 1024
IDS = prompt(1, 90)
BATCH = ragged([90, 37, 61])


def new_tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **how: Any) -> Tensor:
    how = {"max_new_tokens": 9, "do_sample": False} | how
    return model.generate(**inputs, **how)[:, inputs["input_ids"].shape[1] :]


@pytest.fixture(params=["oracle", "icecache-digest:reuse=3"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def turns_of(names: str, cases: Iterable[Any], methods: Sequence[Any] = METHODS) -> pytest.MarkDecorator:
    """Each case with one of the methods, which take turns."""
    pairs = zip(cases, itertools.cycle(methods), strict=False)
    return pytest.mark.parametrize(
        names, [(*case, method) if isinstance(case, tuple) else (case, method) for case, method in pairs]
    )


WAYS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "greedy": (BATCH, {}),
    "beams": (BATCH, {"num_beams": 3}),
    "beams, several returned": (BATCH, {"num_beams": 3, "num_return_sequences": 2}),
    "sampling": (BATCH, {"do_sample": True}),
    "sampling, several returned": (BATCH, {"do_sample": True, "num_return_sequences": 3}),
    "sampled beams": (BATCH, {"do_sample": True, "num_beams": 2}),
    "prompt lookup": ({"input_ids": IDS.repeat(1, 2)}, {"prompt_lookup_num_tokens": 5}),
    "chunks": (BATCH, {"prefill_chunk_size": 40}),
    "chunks inside the padding": (BATCH, {"prefill_chunk_size": 17}),
    "small chunks": (BATCH, {"prefill_chunk_size": 5}),
    "chunks of one": (ragged([31, 12]), {"prefill_chunk_size": 1}),
    "long": ({"input_ids": IDS[:, :20]}, {"max_new_tokens": 40}),
}


@functools.cache
def by_dynamic_cache(way: str) -> Tensor:
    """The new tokens of the fixture's model by transformers alone."""
    model, (inputs, how) = build("llama"), WAYS[way]
    torch.manual_seed(1)
    return new_tokens(model, inputs, **how)


@turns_of("way, method", WAYS)
def test_attached_equals_dynamic_cache(llama: PreTrainedModel, method: str, way: str) -> None:
    inputs, how = WAYS[way]
    expected = by_dynamic_cache(way)
    with kvthaw.attach(llama, method, budget=AMPLE) as handle:
        torch.manual_seed(1)
        assert torch.equal(new_tokens(llama, inputs, **how), expected)
        assert handle.stats().sparse_steps > 0


@turns_of(
    "way, method", ["beams, several returned", "sampled beams", "prompt lookup", "chunks inside the padding"], METHODS[::-1]
)
def test_explicit_cache_equals_dynamic_cache(llama: PreTrainedModel, method: str, way: str) -> None:
    inputs, how = WAYS[way]
    expected = by_dynamic_cache(way)
    torch.manual_seed(1)
    cache = kvthaw.Cache(llama, method, budget=AMPLE)
    assert torch.equal(new_tokens(llama, inputs, past_key_values=cache, **how), expected)
    assert cache.stats().sparse_steps > 0


@turns_of("way, dense_layers", ["beams", "sampling, several returned", "small chunks", "prompt lookup", "long"], [1, 2])
def test_dense_layers_equal_dynamic_cache(llama: PreTrainedModel, way: str, dense_layers: int) -> None:
    inputs, how = WAYS[way]
    expected = by_dynamic_cache(way)
    dense = {"method": "oracle", "dense_layers": 1} if dense_layers == 1 else {"method": "full"}
    with kvthaw.attach(llama, **dense, budget=AMPLE) as handle:
        torch.manual_seed(1)
        assert torch.equal(new_tokens(llama, inputs, **how), expected)
        assert handle.stats().dense_layers == dense_layers
        assert handle.stats().kv_dense_bytes > 0


@turns_of("architecture, method", ["llama", "gemma3", "gemma3n"])
def test_assistant(architecture: str, method: str) -> None:
    if architecture.startswith("gemma") and not ROLLS_BACK_SLIDING:
        pytest.skip("this version of transformers fails to roll back its own sliding-window layers")
    model, assistant = build(architecture), build(architecture)
    with torch.no_grad():  # now and then of another opinion
        assistant.get_output_embeddings().weight += 0.05 * torch.randn_like(assistant.get_output_embeddings().weight)
    inputs = {"input_ids": IDS}
    expected = new_tokens(model, inputs)
    with kvthaw.attach(model, method, budget=AMPLE) as handle:
        assert torch.equal(new_tokens(model, inputs, assistant_model=assistant), expected)
        assert handle.stats().sparse_steps > 0


def test_pipeline(llama: PreTrainedModel) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side="left")
    write = pipeline("text-generation", llama, tokenizer=tokenizer)
    texts = [" ".join(f"w{i}" for i in row.tolist()) for row in (IDS[0], IDS[0, :50])]
    expected = write(texts, max_new_tokens=10, do_sample=False, batch_size=2)
    with kvthaw.attach(llama, "icecache-digest", budget=AMPLE) as handle:
        assert write(texts, max_new_tokens=10, do_sample=False, batch_size=2) == expected
        assert handle.stats().sparse_steps > 0


@turns_of("length, method", [1, 3, 10])
def test_short_prompt_then_long_text(llama: PreTrainedModel, method: str, length: int) -> None:
    inputs = {"input_ids": IDS[:, :length]}
    expected = new_tokens(llama, inputs, max_new_tokens=50)
    with kvthaw.attach(llama, method, budget=64) as handle:
        assert torch.equal(new_tokens(llama, inputs, max_new_tokens=50), expected)
        assert handle.stats().retrieved > 0
    with kvthaw.attach(llama, method, budget=32) as handle:
        assert new_tokens(llama, inputs, max_new_tokens=40).shape == (1, 40)
        assert handle.stats().attended_max <= 32


# Turns


def turns(model: PreTrainedModel, make: Any) -> list[Tensor]:
    """Three turns over one cache, with masks, the second one short."""
    cache, out = make(), []
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
    for turn, length in enumerate((0, 7, 40)):
        more = prompt(3, length, seed=10 + turn)
        ids = torch.cat((ids, more), dim=1)
        mask = torch.cat((mask, torch.ones_like(more)), dim=1)
        ids = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=10, do_sample=False)
        mask = torch.cat((mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])), dim=1)
        out.append(ids)
    return out


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_several_turns(llama: PreTrainedModel, method: str) -> None:
    expected = turns(llama, DynamicCache)
    with kvthaw.attach(llama, method, budget=AMPLE) as handle:
        assert same(turns(llama, DynamicCache), expected)
        assert handle.stats().sparse_steps > 0
    cache = kvthaw.Cache(llama, method, budget=AMPLE)
    assert same(turns(llama, lambda: cache), expected)
    assert cache.stats().tokens == expected[-1].shape[1] - 1
    cache.reset()
    assert same(turns(llama, lambda: cache), expected), "a cache that was reset is as new"


def test_returned_cache_goes_on(llama: PreTrainedModel, method: str) -> None:
    def twice() -> Tensor:
        first = llama.generate(IDS, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
        ids = torch.cat((first.sequences, IDS[:, :30]), dim=1)
        return llama.generate(ids, past_key_values=first.past_key_values, max_new_tokens=20, do_sample=False)

    expected = twice()
    with kvthaw.attach(llama, method, budget=AMPLE) as handle:
        assert torch.equal(twice(), expected)
        assert handle.stats().tokens == expected.shape[1] - 1


def forward(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of every position."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


@turns_of("drop, method", [1, 20, 37, 70, 89])
def test_crop(llama: PreTrainedModel, method: str, drop: int) -> None:
    plain, cache = DynamicCache(config=llama.config), kvthaw.Cache(llama, method, budget=AMPLE)
    for c in (plain, cache):
        forward(llama, c, IDS)
        for t in range(25):
            forward(llama, c, IDS[:, t : t + 1])
        c.crop(-drop)
        assert c.get_seq_length() == 115 - drop
    for ids in (IDS[:, 3:4], IDS[:, 3:9], IDS[:, 3:60], IDS[:, 3:4]):
        torch.testing.assert_close(forward(llama, cache, ids), forward(llama, plain, ids), atol=1e-4, rtol=1e-4)


def test_a_copy_of_a_row_shorter_than_the_sink(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, budget=TIGHT)
    rows = ragged([60, 20])
    forward(llama, cache, rows["input_ids"], rows["attention_mask"])
    cache.crop(-19)
    twin, mask = copy.deepcopy(cache), torch.cat((rows["attention_mask"][:, :41], torch.ones(2, 1)), dim=1)
    assert torch.equal(forward(llama, twin, prompt(2, 1), mask), forward(llama, cache, prompt(2, 1), mask))


def test_crop_to_nothing(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, budget=AMPLE)
    forward(llama, cache, IDS)
    cache.crop(-90)
    assert cache.get_seq_length() == 0
    expected = forward(llama, None, IDS[:, :30])
    torch.testing.assert_close(forward(llama, cache, IDS[:, :30]), expected, atol=1e-4, rtol=1e-4)


@turns_of("change, method", ["repeat", "select", "select by mask", "reorder"])
def test_sequences_change(llama: PreTrainedModel, method: str, change: str) -> None:
    rows = {"repeat": [0, 0, 1, 1, 2, 2], "select": [2, 0], "select by mask": [0, 2], "reorder": [1, 1, 0]}[change]
    cache = kvthaw.Cache(llama, method, budget=AMPLE)
    ids, mask = torch.empty(3, 0, dtype=torch.long), torch.empty(3, 0, dtype=torch.long)

    def grow(more: Tensor, visible: Tensor | None = None) -> Tensor:
        nonlocal ids, mask
        ids = torch.cat((ids, more), dim=1)
        mask = torch.cat((mask, torch.ones_like(more) if visible is None else visible), dim=1)
        places = positions(mask)[:, -more.shape[1] :]
        with torch.no_grad():
            return llama(more, attention_mask=mask, position_ids=places, past_key_values=cache).logits

    grow(BATCH["input_ids"], BATCH["attention_mask"])
    for t in range(3):
        grow(prompt(3, 1, seed=50 + t))
    if change == "repeat":
        cache.batch_repeat_interleave(2)
    elif change == "select":
        cache.batch_select_indices(torch.tensor(rows))
    elif change == "select by mask":
        cache.batch_select_indices(torch.tensor([True, False, True]))
    else:
        cache.reorder_cache(torch.tensor(rows))
    ids, mask = ids[rows], mask[rows]
    for t in range(25):  # sequences now differ in what they are given
        found = grow(prompt(len(rows), 1, seed=t))
    with torch.no_grad():
        expected = llama(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    torch.testing.assert_close(found[:, -1], expected[:, -1], atol=1e-4, rtol=1e-4)


def positions(mask: Tensor) -> Tensor:
    """As generate() numbers them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_deepcopied_prefix_serves_two_continuations(llama: PreTrainedModel, method: str) -> None:
    prefix = kvthaw.Cache(llama, method, budget=AMPLE)
    forward(llama, prefix, IDS)
    for seed in (1, 2):
        ids = torch.cat((IDS, prompt(1, 20, seed=seed)), dim=1)
        expected = llama.generate(ids, max_new_tokens=25, do_sample=False)
        found = llama.generate(ids, past_key_values=copy.deepcopy(prefix), max_new_tokens=25, do_sample=False)
        assert torch.equal(found, expected)
    assert prefix.get_seq_length() == 90
    ids = torch.cat((IDS, IDS[:, :9]), dim=1)
    expected = llama.generate(ids, max_new_tokens=25, do_sample=False)
    assert torch.equal(llama.generate(ids, past_key_values=prefix, max_new_tokens=25, do_sample=False), expected)


# Below the full budget a cache must agree with itself


TIGHT = 32


def decode(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    """Logits of tokens given one by one."""
    logits = [forward(model, cache, ids[:, t : t + 1]) for t in range(ids.shape[1])]
    return torch.cat(logits, dim=1) if logits else torch.empty(0)


@turns_of("architecture, steps, method", [("llama", 2), ("gemma3", 8), ("gpt_oss", 5)])
def test_several_tokens_equal_one_by_one(architecture: str, method: str, steps: int) -> None:
    model = build_exact(architecture)
    one, many = (kvthaw.Cache(model, method, budget=TIGHT) for _ in range(2))
    ids = prompt(1, 5 * steps, seed=3)
    for cache in (one, many):
        forward(model, cache, IDS)
    expected = decode(model, one, ids)
    found = torch.cat([forward(model, many, ids[:, t : t + steps]) for t in range(0, 5 * steps, steps)], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert one.stats() == many.stats()


@pytest.mark.parametrize("size", [20, 33])
def test_chunked_prefill_equals_unchunked(size: int) -> None:
    """With an index that does not care how its tokens came; a tree that grew is another tree than one that was built."""
    llama, method, ids = build_exact("llama"), "oracle", prompt(1, 140)
    found, expected = [], []
    for to, chunk in ((expected, 140), (found, size)):
        cache = kvthaw.Cache(llama, method, budget=TIGHT, sparse_queries=1)
        for start in range(0, 140, chunk):
            last = forward(llama, cache, ids[:, start : start + chunk])[:, -1:]
        to += [last, decode(llama, cache, ids[:, :20])]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_copy_goes_on_as_the_original(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, budget=TIGHT)
    forward(llama, cache, IDS)
    decode(llama, cache, IDS[:, :13])
    twin = copy.deepcopy(cache)
    assert twin.stats() == cache.stats()
    assert torch.equal(decode(llama, twin, IDS[:, 20:50]), decode(llama, cache, IDS[:, 20:50]))
    assert twin.stats() == cache.stats()


@pytest.mark.parametrize(("decoded", "drop"), [(0, 6), (3, 12), (17, 1), (24, 6), (40, 12)])
def test_crop_undoes(decoded: int, drop: int) -> None:
    """Oracle's index forgets completely, so what follows a crop is what would have followed without the dropped tokens."""
    llama = build_exact("llama")
    cache = kvthaw.Cache(llama, "oracle", budget=TIGHT)
    forward(llama, cache, IDS)
    decode(llama, cache, IDS[:, :decoded])
    twin = copy.deepcopy(cache)
    decode(llama, cache, IDS[:, 50 : 50 + drop])
    cache.crop(-drop)
    torch.testing.assert_close(decode(llama, cache, IDS[:, 20:35]), decode(llama, twin, IDS[:, 20:35]), atol=1e-4, rtol=1e-4)


@turns_of("target, source", FORKED, ["full", "oracle", "icecache-digest:reuse=3"])
def test_fork_equals_a_fresh_prefill(source: str, target: str) -> None:
    """Of three layers, for infinigen's and omnikv's first two are not as the others."""
    llama = build("llama", num_hidden_layers=3)
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
    origin = kvthaw.Cache(llama, source, budget=64)
    fresh = kvthaw.Cache(llama, target, budget=TIGHT)
    for cache in (origin, fresh):
        forward(llama, cache, ids, mask)
    fork = origin.fork(target, budget=TIGHT)
    expected = decode(llama, fresh, prompt(3, 6, seed=4))
    decode(llama, origin, prompt(3, 2, seed=5))
    assert fork.get_seq_length() == 90
    assert torch.equal(decode(llama, fork, prompt(3, 6, seed=4)), expected)
    assert replace(fork.stats(), no_effect={}) == replace(
        fresh.stats(), no_effect={}
    )  # a fork is given all settings of its origin


def test_forks_of_a_dense_cache_share_what_was_offloaded_for_the_first(llama: PreTrainedModel) -> None:
    base = kvthaw.Cache(llama, "full", block_size=16)
    ids, more = prompt(2, 90, seed=3), prompt(2, 40, seed=4)
    forward(llama, base, ids)
    first, second = base.fork("oracle", budget=TIGHT), base.fork("quest", budget=TIGHT)
    held = base.stats().kv_host_bytes
    assert held == 80 / 90 * base.stats().kv_dense_bytes
    for mine, theirs in zip(first.kv.offloaded, second.kv.offloaded, strict=True):
        for seq in range(2):
            same = mine.store.table.row(seq) == theirs.store.table.row(seq)
            assert same.tolist() == [True] * 5 + [False]
    decode(llama, first, more)
    fresh = kvthaw.Cache(llama, "quest", budget=TIGHT, block_size=16)
    forward(llama, fresh, ids)
    assert torch.equal(decode(llama, second, more), decode(llama, fresh, more))
    assert second.stats() == fresh.stats()
    base.crop(-30)  # what was offloaded of the last 30 is no longer true
    forward(llama, base, more)
    assert base.stats().kv_host_bytes == 0
    fresh = kvthaw.Cache(llama, "quest", budget=TIGHT, block_size=16)
    forward(llama, fresh, torch.cat((ids[:, :60], more), dim=1))
    for _ in range(2):
        third = base.fork("quest", budget=TIGHT)
        for mine, theirs in zip(third.kv.offloaded, fresh.kv.offloaded, strict=True):
            assert torch.allclose(mine.read(1, 0, 100), theirs.read(1, 0, 100), atol=1e-5)
        forward(llama, base, more[:, :1])  # more full blocks follow
        fresh = kvthaw.Cache(llama, "quest", budget=TIGHT, block_size=16)
        forward(llama, fresh, torch.cat((ids[:, :60], more, more[:, :1]), dim=1))
    base.batch_select_indices(torch.tensor([1]))
    fourth = base.fork("oracle", budget=TIGHT)
    assert torch.equal(fourth.kv.layers[0].read(0, 0, 102), base.kv.layers[0].read(0, 0, 102))


SAME = [name for name in kvthaw.METHODS if resolve(name).any_budget]


@pytest.mark.parametrize("name", SAME)
def test_an_index_that_serves_any_budget_is_not_built_again(
    llama: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, more = prompt(2, 300, seed=3), prompt(2, 8, seed=4)
    base = kvthaw.Cache(llama, "full", dense_layers=1)
    forward(llama, base, ids)
    first = base.fork(name, budget=256)
    fresh = {budget: base.fork(name, budget=budget) for budget in (256, 263)}
    method = first.settings.method
    first.wait()
    built: list[Any] = []
    (kind,) = {type(kv.retriever.index) for kv in first.kv.offloaded if kv.retriever is not None}
    build = kind.build
    monkeypatch.setattr(kind, "build", lambda self, *args: (built.append(self), build(self, *args)))
    forks = {budget: first.fork(method, budget=budget) for budget in (263, 256)}
    assert not built
    expected = {budget: decode(llama, cache, more) for budget, cache in fresh.items()}
    for budget, fork in forks.items():
        assert torch.equal(decode(llama, fork, more), expected[budget])
        assert fork.stats() == fresh[budget].stats()
        assert fork.settings.budget == budget
    for mine, theirs in zip(fork.kv.offloaded, first.kv.offloaded, strict=True):
        held = theirs.store.reserved(0)
        assert mine.store.table.row(0)[0] == theirs.store.table.row(0)[0], "rows are shared"
        mine.store.claim([(0, held + 1)])
        assert theirs.store.reserved(0) == held, "what comes to a fork is its own"
    others = (  # of other regions; of more tokens than the prompt's; of a method made again, which may have other options
        (first, method, 48),
        (forks[256], method, 256),
        (first, name, 263),
    )
    for origin, of, budget in others:
        origin.fork(of, budget=budget).wait()
        assert len(built) == 2 * len({id(index) for index in built}) > 0
        built.clear()
    assert torch.equal(decode(llama, first.fork(method, budget=263), more), expected[263])


def test_fork_later(llama: PreTrainedModel, method: str) -> None:
    origin = kvthaw.Cache(llama, method, budget=TIGHT)
    forward(llama, origin, IDS)
    decode(llama, origin, IDS[:, :30])
    fork = origin.fork("full")
    for mine, theirs in zip(origin.kv.layers, fork.kv.layers, strict=True):
        assert torch.equal(mine.read(0, 0, 120), theirs.read(0, 0, 120))
    origin.batch_repeat_interleave(2)
    assert origin.fork("full").stats().batch == 2


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_forks_under_another_method_share_blocks(llama: PreTrainedModel, kv_dtype: Any) -> None:
    """And each copies a block that it writes to."""
    origin = kvthaw.Cache(llama, "oracle", budget=TIGHT, block_size=16)
    more = prompt(1, 40, seed=6)
    forward(llama, origin, IDS)
    decode(llama, origin, IDS[:, :30])
    expected = decode(llama, origin.fork("quest", budget=TIGHT, kv_dtype=kv_dtype), more)
    fork = origin.fork("quest", budget=TIGHT, kv_dtype=kv_dtype)
    for mine, theirs in zip(origin.kv.offloaded, fork.kv.offloaded, strict=True):
        full = mine.store.length(0) // 16
        assert full >= 5
        same = mine.store.table.row(0)[:full] == theirs.store.table.row(0)[:full]
        assert same.tolist() == [kv_dtype is None] * full
    decode(llama, origin, prompt(1, 50, seed=7))
    assert torch.equal(decode(llama, fork, more), expected)


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_layers_that_share_kv_continue_densely(architecture: str, method: str) -> None:
    """Their layers ask an index that has gone on already, so several tokens at once see everything instead."""
    model = build(architecture)
    cache, plain = kvthaw.Cache(model, method, budget=TIGHT), DynamicCache(config=model.config)
    for c in (cache, plain):
        forward(model, c, IDS)
    steps = cache.stats().sparse_steps
    more = prompt(1, 8)
    torch.testing.assert_close(forward(model, cache, more), forward(model, plain, more), atol=1e-4, rtol=1e-4)
    assert cache.stats().sparse_steps == steps
    for t in range(3):
        forward(model, cache, more[:, t : t + 1])
    stats = cache.stats()
    assert stats.attended_mean <= stats.attended_max <= TIGHT, "their queries count too"  # type: ignore[operator]
