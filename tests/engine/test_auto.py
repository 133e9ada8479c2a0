"""Full attention up to a number of tokens and the method from then on: tokens are those of the one in force."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvthaw
from kvthaw import Batch, Cache, PrefixCache, Scheduler
from kvthaw.cache import host_memory
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.config import CacheConfig, Crossing
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.engine.warm import _serve, warm
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.methods import auto, resolve
from lab.bench.shapes import build
from stand_in import StandIn, captured_by
from zoo import build_exact, prompt

HOW: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
SMALL: dict[str, Any] = {"budget": 32, "block_size": 16, "dense_layers": 0}


def follow(model: PreTrainedModel, cache: Any, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after a prompt, and after each of some tokens that follow it one by one."""
    with torch.no_grad():
        found = [model(ids, past_key_values=cache, logits_to_keep=1).logits]
        found += [model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("method", ["pariskv-plus", "icecache-digest", "streaming"])
def test_logits_are_those_of_full_attention_and_then_of_the_method(llama: PreTrainedModel, method: str) -> None:
    """The method's are those of a cache that was given all tokens until then as its prompt."""
    ids, tokens = prompt(1, 90), prompt(1, 30, seed=1)
    expected = follow(llama, DynamicCache(), ids, tokens)
    cache = Cache(llama, method, full_below=100, **SMALL)
    assert cache.stats().method == "full"
    found = follow(llama, cache, ids, tokens)
    torch.testing.assert_close(found[:, :11], expected[:, :11], rtol=1e-4, atol=1e-5)
    other = Cache(llama, method, **SMALL)
    after = follow(llama, other, torch.cat((ids, tokens[:, :10]), dim=1), tokens[:, 10:])
    torch.testing.assert_close(found[:, 11:], after[:, 1:], rtol=1e-4, atol=1e-5)
    stats = cache.stats()
    assert (stats.method, stats.tokens) == (method, 120)
    assert "101 tokens" in stats.reason
    assert not torch.allclose(found[:, 11:], expected[:, 11:], rtol=1e-4, atol=1e-5)


def test_rows_of_different_lengths_change_together(llama: PreTrainedModel) -> None:
    """By the tokens of all rows; padding does not count."""
    ids, tokens = prompt(2, 60), prompt(2, 12, seed=1)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    cache, other = Cache(llama, "oracle", full_below=56, **SMALL), Cache(llama, "oracle", **SMALL | {"budget": 4096})
    for each in (cache, other):
        with torch.no_grad():
            llama(ids, attention_mask=mask, past_key_values=each)
    for step in range(12):
        assert (cache.stats().method == "full") == (step <= 6)
        own = torch.cat((mask, torch.ones(2, step + 1, dtype=mask.dtype)), dim=1)
        with torch.no_grad():
            found, expected = (
                llama(tokens[:, step : step + 1], attention_mask=own, past_key_values=each).logits for each in (cache, other)
            )
        if step < 6:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    alone = Cache(llama, "oracle", **SMALL)
    whole = torch.cat((ids, tokens), dim=1)
    follow(llama, alone, whole[1:, 20:66], whole[1:, 66:71])
    torch.testing.assert_close(found[1:], follow_last(llama, alone, whole[1:, 71:]), rtol=1e-4, atol=1e-5)


def follow_last(model: PreTrainedModel, cache: Cache, token: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(token, past_key_values=cache).logits


def test_a_long_prompt_begins_under_the_method(llama: PreTrainedModel) -> None:
    ids, tokens = prompt(1, 90), prompt(1, 8, seed=1)
    cache = Cache(llama, "pariskv-plus", full_below=60, **SMALL)
    expected = follow(llama, Cache(llama, "pariskv-plus", **SMALL), ids, tokens)
    assert torch.equal(follow(llama, cache, ids, tokens), expected)
    cache.reset()
    assert cache.stats().method == "full"
    short = follow(llama, cache, ids[:, :40], tokens)
    torch.testing.assert_close(short, follow(llama, DynamicCache(), ids[:, :40], tokens), rtol=1e-4, atol=1e-5)


def test_what_full_attention_holds_can_be_cropped_reordered_forked_and_saved(llama: PreTrainedModel, tmp_path: Any) -> None:
    """And what the method holds after it."""
    ids, tokens = prompt(2, 50), prompt(2, 20, seed=1)
    cache = Cache(llama, "oracle", full_below=60, **SMALL | {"budget": 4096})
    follow(llama, cache, ids, tokens[:, :6])
    for more in (0, 20):  # under full attention, and behind the change
        for token in tokens[:, :more].split(1, dim=1) if more else ():
            follow_last(llama, cache, token)
        assert cache.stats().method == ("oracle" if more else "full")
        cache.keep(50)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        fork = cache.fork("oracle", budget=4096)
        cache.save(tmp_path / "kv", ids)
        loaded = Cache.load(tmp_path / "kv", llama, "oracle", full_below=60, **SMALL | {"budget": 4096})
        expected = follow(llama, Cache(llama, "full"), ids, tokens[:, :3])[:, 1:]
        for each in (fork, loaded):
            found = torch.cat([follow_last(llama, each, token) for token in tokens[:, :3].split(1, dim=1)], dim=1)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def kv_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Of so many tokens in all layers."""
    config = model.config
    return 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize * config.num_hidden_layers * tokens


@pytest.mark.parametrize("blocks", [False, True])
def test_a_batch_changes_by_its_tokens_and_back_when_it_is_empty(llama: PreTrainedModel, *, blocks: bool) -> None:
    """Whether full attention has room for the capacity of all sequences, or takes blocks as tokens come."""
    settings: dict[str, Any] = {"max_seqs": 3, "capacity": 512 if blocks else 128, **SMALL, "budget": 4096}
    more: dict[str, Any] = {"full_below": 40, "device_memory": kv_bytes(llama, 400) if blocks else None}
    batch, full = Batch(llama, "oracle", **settings, **more), Batch(llama, "full", **settings)
    for lengths in ((30, 30, 70), (20,)):
        in_force = []
        for length in lengths:
            joined = [each.join(prompt(1, length, seed=length)[0], max_new_tokens=20, stop=[]) for each in (batch, full)]
            for _ in range(4):
                for each in (batch, full):
                    each.step()
            in_force.append(batch.stats().method)
            assert batch.cache.kv.chooser.in_blocks == (blocks and in_force[-1] == "full")
            assert joined[0].tokens == joined[1].tokens
        assert in_force == (["full", "full", "oracle"] if len(lengths) > 1 else ["full"])
        while batch.requests:
            mine, its = ({request.arrived: request.tokens for request in each.step()} for each in (batch, full))
            assert mine == its


@pytest.mark.parametrize("lengths", [(60, 70, 80, 90), (40, 50, 60, 300)])
def test_fewer_sequences_where_device_memory_holds_no_more_under_the_method(
    llama: PreTrainedModel, lengths: tuple[int, ...]
) -> None:
    """The method follows when four have grown, or when a long prompt comes that is the last of them: tokens are those of full
    attention, which is in force again once all have left."""
    settings: dict[str, Any] = {"capacity": 512, **SMALL, "budget": 4096}
    one = sequence_bytes(llama, "oracle", 512, CacheConfig.split(settings)[0])
    more: dict[str, Any] = {"full_below": 100, "device_memory": 5 * one // 2}
    schedulers = [
        Scheduler(Batch(llama, name, max_seqs=4, **settings, **own), step_tokens=64)
        for name, own in (("oracle", more), ("full", {}))
    ]
    batch, again = schedulers[0].batch, [20, 30, 25, 40]
    for of in (lengths, again):
        told = []
        for each in schedulers:
            requests = [each.submit(prompt(1, n, seed=n)[0], max_new_tokens=30, stop=()) for n in of]
            seen = set()
            while each.busy:
                each.step()
                stats = each.batch.stats()
                seen.add((stats.method, each.batch.max_seqs))
                assert len(each.batch.requests) <= each.batch.max_seqs
            told.append(([request.tokens for request in requests], seen))
        assert told[0][0] == told[1][0]
        assert told[0][1] == ({("full", 4), ("oracle", 2)} if of == lengths else {("full", 4)})
    assert schedulers[0].preemptions == schedulers[0].recomputed >= 1
    assert batch.max_seqs == 4


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_requests_wait_for_blocks_while_full_attention_is_faster(llama: PreTrainedModel, dense_layers: int) -> None:
    """The slots' capacity and their tokens at the crossing exceed device_memory many times: short requests wait for each other
    under full attention, all layers in blocks. Long ones bring the method. Tokens are those of full attention."""
    settings: dict[str, Any] = {"capacity": 512, "block_size": 16}
    own: dict[str, Any] = {"full_below": 150, "device_memory": kv_bytes(llama, 1300), "retrieved": 512}
    schedulers = [
        Scheduler(Batch(llama, name, max_seqs=12, **settings, **more), step_tokens=64)
        for name, more in (("oracle", own | {"dense_layers": dense_layers}), ("full", {}))
    ]
    kv, rounds, preempted = schedulers[0].batch.cache.kv, ([60, 70, 90, 30] * 3, [200, 310], [40] * 12), 0
    for lengths in rounds:
        told, seen, together = list[list[list[int]]](), set[str](), 0
        for each in schedulers:
            requests = [each.submit(prompt(1, n, seed=n)[0], max_new_tokens=30, stop=()) for n in lengths]
            while each.busy:
                each.step()
                if each is schedulers[0] and each.batch.requests:
                    seen.add(each.batch.stats().method)
                    together = max(together, len(each.batch.requests))
                    assert sum(layer.device_bytes() for layer in kv.layers) <= own["device_memory"]
            told.append([request.tokens for request in requests])
        assert told[0] == told[1]
        if lengths == rounds[1]:
            assert "oracle" in seen
        else:
            assert seen == {"full"}
            assert kv.chooser.in_blocks
            assert 2 <= together < len(lengths)
            assert all(layer.host_bytes() == 0 for layer in kv.layers)
            assert schedulers[0].preemptions == preempted
        preempted = schedulers[0].preemptions


def test_full_attention_in_blocks_takes_memory_for_the_tokens_there_are(llama: PreTrainedModel) -> None:
    """Prompts in chunks, requests that give their places back and go on, steps that fail: tokens are those of full attention, no
    row is on the host, and nothing is left."""
    room = kv_bytes(llama, 900)
    how: dict[str, Any] = {"max_seqs": 4, "capacity": 512, "prefill_chunk": 24, **SMALL}
    batch, full = (
        Batch(llama, name, **how, **more)
        for name, more in (("pariskv-plus", {"full_below": 150, "device_memory": room}), ("full", {}))
    )
    prompts = [prompt(1, length, seed=length)[0] for length in (5, 90, 33, 70, 12, 64)]
    told = []
    for each in (batch, full):
        waiting, requests, steps = list(prompts), [], 0
        while waiting or each.requests:
            while waiting and each.free:
                requests.append(each.join(waiting.pop(0), max_new_tokens=40, stop=()))
            each.step()
            steps += 1
            if steps == 12:
                assert each.preempt(requests[0])
                each.join(requests[0])
            stats = each.stats()
            assert (stats.method, stats.kv_host_bytes) == ("full", 0)
        told.append([request.tokens for request in requests])
    assert told[0] == told[1]
    kv = batch.cache.kv
    assert kv.chooser.in_blocks
    assert stats.kv_dense_bytes <= room
    assert sum(layer.store.nbytes() + layer.store.nbytes(on_device=True) for layer in kv.offloaded) == 0


def test_blocks_of_full_attention_that_the_device_has_no_room_for(llama: PreTrainedModel) -> None:
    """Lie on the host for a step at most: the method is in force from the next one on."""
    settings: dict[str, Any] = {"max_seqs": 3, "capacity": 512, **SMALL, "budget": 4096}
    room = kv_bytes(llama, 800)
    batch, full = Batch(llama, "oracle", full_below=150, device_memory=room, **settings), Batch(llama, "full", **settings)
    in_force, requests = [], []
    for length in (40, 60, 30):
        requests.append([each.join(prompt(1, length, seed=length)[0], max_new_tokens=40, stop=()) for each in (batch, full)])
        for _ in range(9):
            for each in (batch, full):
                each.step()
            stats = batch.stats()
            in_force.append((stats.method, stats.kv_host_bytes > 0))
            if len(in_force) == 5:
                batch.cache.kv.streams.device.bytes = kv_bytes(llama, 20)  # as if something else had taken the rest
    assert in_force[:5] == [("full", False)] * 5
    assert in_force[8] == ("oracle", True)
    while batch.requests or full.requests:
        for each in (batch, full):
            each.step()
    assert all(own.tokens == its.tokens for own, its in requests)


def test_kept_prompts_and_full_attention_in_blocks(llama: PreTrainedModel) -> None:
    """Requests share the blocks of a prefix, before and behind the change; tokens are those of full attention."""
    settings: dict[str, Any] = {"max_seqs": 3, "capacity": 512, **SMALL, "budget": 4096}
    kept = PrefixCache()
    batch = Batch(llama, "oracle", full_below=300, device_memory=kv_bytes(llama, 1200), prefix_cache=kept, **settings)
    full, prefix, in_force, requests = Batch(llama, "full", **settings), prompt(1, 180, seed=9)[0], [], []
    for more in (7, 20, 1, 300, 290):
        ids = torch.cat((prefix, prompt(1, more, seed=more)[0]))
        requests.append([each.join(ids, max_new_tokens=20, stop=()) for each in (batch, full)])
        for _ in range(8):
            for each in (batch, full):
                each.step()
        in_force.append(batch.stats().method)
    while batch.requests or full.requests:
        for each in (batch, full):
            each.step()
    assert (in_force[:3], in_force[4]) == (["full"] * 3, "oracle")
    assert [own.tokens for own, _ in requests] == [its.tokens for _, its in requests]
    assert [own.cached_tokens > 0 for own, _ in requests] == [False, True, True, True, True]


@pytest.mark.parametrize("blocks", [False, True])
def test_a_batch_may_begin_with_the_method_once(llama: PreTrainedModel, *, blocks: bool) -> None:
    """As warm() has it, to compile its kernels; full attention is in force once that request has left."""
    settings: dict[str, Any] = {"max_seqs": 3, "capacity": 512, **SMALL}
    more: dict[str, Any] = {"full_below": 40, "device_memory": kv_bytes(llama, 400) if blocks else None}
    batch, in_force = Batch(llama, "pariskv-plus", **settings, **more), []
    for seed in range(2):
        request = batch.join(prompt(1, 30, seed=seed)[0], max_new_tokens=4, stop=())
        if not seed:
            batch.cache.kv.chooser.change("kernels are compiled")
        while batch.requests:
            batch.step()
            in_force.append(batch.stats().method)
    assert in_force[0] == "pariskv-plus"
    assert in_force[-1] == "full"
    assert batch.cache.kv.chooser.in_blocks == blocks
    full = Batch(llama, "full", **settings)
    own = full.join(prompt(1, 30, seed=1)[0], max_new_tokens=4, stop=())
    while full.requests:
        full.step()
    assert request.tokens == own.tokens


def test_a_step_that_fails_is_taken_again_behind_the_change(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, tokens = prompt(1, 50), prompt(1, 10, seed=1)
    caches = [Cache(llama, "pariskv-plus", full_below=55, **SMALL) for _ in range(2)]
    expected = follow(llama, caches[0], ids, tokens)
    follow(llama, caches[1], ids, tokens[:, :5])
    last = caches[1].kv.chooser.by_method[1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "decode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            follow_last(llama, caches[1], tokens[:, 5:6])
    found = torch.cat([follow_last(llama, caches[1], token) for token in tokens[:, 5:].split(1, dim=1)], dim=1)
    torch.testing.assert_close(found, expected[:, 6:], rtol=1e-4, atol=1e-5)


def test_the_layers_in_force_change_as_a_set(llama: PreTrainedModel) -> None:
    """Who goes through them finds those that it began with, whatever is chosen meanwhile."""
    cache = Cache(llama, "pariskv-plus", full_below=55, **SMALL)
    sets = [cache.kv.layers]
    follow(llama, cache, prompt(1, 50), prompt(1, 10, seed=1))
    sets.append(cache.kv.layers)
    cache.reset()
    sets.append(cache.kv.layers)
    kinds = [{type(layer) for layer in layers} for layers in sets]
    assert kinds == [{DenseLayer}, {OffloadedLayer}, {DenseLayer}]
    assert not set(sets[0]) & set(sets[2])


def test_where_the_host_has_no_memory_full_attention_goes_on(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(need: int, limit: int | None) -> None:
        if need:
            raise HostMemoryError("no more")

    ids, tokens = prompt(1, 50), prompt(1, 10, seed=1)
    monkeypatch.setattr(host_memory, "check_host_memory", short)
    cache = Cache(llama, "pariskv-plus", full_below=55, **SMALL)
    found = follow(llama, cache, ids, tokens)
    torch.testing.assert_close(found, follow(llama, DynamicCache(), ids, tokens), rtol=1e-4, atol=1e-5)
    assert "host memory is short" in caplog.text


def test_kv_that_device_memory_does_not_hold_is_the_methods(llama: PreTrainedModel) -> None:
    cache = Cache(llama, "pariskv-plus", full_below=1000, device_memory="8KiB", **SMALL)
    follow(llama, cache, prompt(1, 50), prompt(1, 3))
    assert cache.stats().method == "pariskv-plus"
    assert "device_memory is" in cache.stats().reason


def test_a_batch_that_never_fits_stays_with_the_method(llama: PreTrainedModel) -> None:
    """Nothing that its steps read moves when a first request comes after all have left."""
    batch = Batch(llama, "pariskv-plus", max_seqs=2, capacity=200, full_below=1000, device_memory="8KiB", **SMALL)
    found = []
    for seed in range(2):
        request = batch.join(prompt(1, 90, seed=seed)[0], max_new_tokens=4, stop=())
        while batch.requests:
            batch.step()
            found.append([tensor.data_ptr() for tensor in batch.cache.kv.tensors()])
        assert batch.stats().method == "pariskv-plus"
        one = Batch(llama, "pariskv-plus", max_seqs=1, capacity=200, **SMALL)
        own = one.join(prompt(1, 90, seed=seed)[0], max_new_tokens=4, stop=())
        while one.requests:
            one.step()
        assert request.tokens == own.tokens
    assert found[1:] == found[1:2] * (len(found) - 1)


def test_a_captured_step_is_captured_anew_at_the_change_alone(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, captures = Cache(llama, "pariskv-plus", full_below=60, **SMALL), []

    def graph() -> StandIn:
        captures.append(cache.stats().method)
        return StandIn()

    captured_by(monkeypatch, graph)
    follow(llama, cache, prompt(1, 50), prompt(1, 1))
    runner, token = ElasticGraph(llama.forward, cache), torch.ones((1, 1), dtype=torch.int64)
    for at in range(51, 75):
        runner(token, torch.tensor([[at]]))
    assert captures == ["full", "pariskv-plus"]


@pytest.mark.parametrize("given", [-1, "many", 1.5])
def test_other_values_of_full_below_are_refused(llama: PreTrainedModel, given: Any) -> None:
    with pytest.raises(ConfigError, match="full_below is"):
        Cache(llama, full_below=given)


def test_auto_is_the_default_and_says_what_it_chose(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with kvthaw.attach(llama, full_below=55, **SMALL) as handle:
        llama.generate(prompt(1, 50), max_new_tokens=10, **HOW)
        assert "full attention up to 55 tokens" in repr(handle)
        assert handle.stats().method == "icecache-digest"
    assert "icecache-digest from here on" in caplog.text
    expected = llama.generate(prompt(1, 50), max_new_tokens=10, **HOW)
    with kvthaw.attach(llama) as handle:
        assert torch.equal(llama.generate(prompt(1, 50), max_new_tokens=10, **HOW), expected)
        assert handle.stats().method == "full"


@pytest.mark.parametrize(("seqs", "total"), [(1, 1000), (2, 1750), (3, 2500), (5, 4000), (10, 8000)], ids=str)
def test_crossings_between_and_beyond_known_numbers_of_sequences(seqs: int, total: int) -> None:
    known = Crossing(((1, 1000), (3, 2500 // 3), (5, 800)))
    assert known.total(seqs) == pytest.approx(total, abs=2)
    assert replace(known, token_bytes=4096).on(1024, torch.device("cpu")).total(seqs) == pytest.approx(4 * total, abs=20)


def test_every_device_has_a_method() -> None:
    for best in auto.BEST.values():
        (method,), crossing = auto.candidates(best.method, torch.device("cpu"))
        assert method.name == best.method.partition(":")[0]
        assert crossing is None
        assert best.crossing.total(1) > 0
    assert auto.candidates("auto", torch.device("cpu"))[1] is not None
    with pytest.raises(ConfigError, match="option 'reuse'"):
        auto.candidates("auto", torch.device("cpu"), reuse=2)
    with pytest.raises(ConfigError, match=r"no option 'sink'; it has none of its own$"):
        auto.check_settings("auto:sink=4", CacheConfig())


def test_auto_takes_the_fastest_method_that_fits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU as on a GPU; of this small model pariskv-plus keeps less than clusterkv-plus."""
    fast, small = "clusterkv-plus", "pariskv-plus"
    monkeypatch.setitem(auto.BEST, "cpu", auto.Best((fast, small), Crossing(((1, 100),), 0, "for a test")))
    model = build_exact("llama", max_position_embeddings=4096)
    most, least, most_attached, least_attached = (
        Cache(model, name, device_memory=1, **SMALL).needs(1, *tokens, pinned=False).device
        for tokens in ((2000, 0), (2000 - 256, 256))
        for name in (fast, small)
    )
    for memory, attached, name, fits in (
        (most, most_attached, fast, True),
        (most - 1, most_attached - 1, small, True),
        (least - 1, least_attached - 1, small, False),
    ):
        cache = Cache(model, device_memory=memory, sized_for=(1, 2000, 0), **SMALL)
        assert cache.settings.method.name == name
        assert ("no method fits" in caplog.text) is not fits
        with kvthaw.attach(model, device_memory=attached, **SMALL) as handle:
            model.generate(prompt(1, 2000 - 256), max_new_tokens=3, **HOW)
            stats = handle.stats()
        assert stats.method == name
        assert (f"{fast} would need" in stats.reason) == (name != fast)
        batch = Batch(model, max_seqs=2, capacity=2000, device_memory=memory, **SMALL)
        assert batch.cache.settings.method.name == cache.fork("auto").settings.method.name == name
    assert Cache(model, device_memory=most - 1, sized_for=(1, 200, 0), **SMALL).settings.method.name == fast


@pytest.mark.gpu
def test_gpu_auto_takes_the_fastest_method_that_fits(device: torch.device) -> None:
    """And a second call the same, though the first left its cache behind."""
    model, how = build("tiny", device), {"budget": 128, "dense_layers": 0}
    needs = {
        name: Cache(model, name, device_memory=1, **how).needs(1, 20_256, 0, pinned=True).device
        for name in auto.BEST["cuda"].methods
    }
    assert sorted(needs.values(), reverse=True) == list(needs.values())
    ids = torch.randint(1, 1000, (1, 20_000), device=device)
    for name, memory in needs.items():
        with kvthaw.attach(model, device_memory=memory, full_below=100, **how) as handle:
            for _ in range(2):
                model.generate(ids, max_new_tokens=4, **HOW)
                assert handle.stats().method == name


def test_an_attached_model_gives_the_memory_of_the_latest_call_back_first(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", **SMALL) as handle:
        llama.generate(prompt(1, 90), max_new_tokens=3, **HOW)
        before, made, gone = weakref.ref(handle.cache), handle._forward.make, list[bool]()

        def make(sized_for: tuple[int, int, int] | None) -> Cache:
            gone.append(before() is None)
            return made(sized_for)

        handle._forward.make = make
        llama.generate(prompt(1, 90), max_new_tokens=3, **HOW)
    assert gone == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv-plus", "icecache-digest-device", "icecache-digest"])
def test_gpu_captured_steps_before_and_behind_the_change(method: str, device: torch.device) -> None:
    model = build("tiny", device).float()
    ids, found = torch.randint(1, 1000, (1, 600), generator=torch.Generator().manual_seed(0)).to(device), []
    for capture in (False, True):
        how: dict[str, Any] = {"full_below": 640, "budget": 128, "device_memory": "auto"}
        with kvthaw.attach(model, method, capture=capture, **how) as handle:
            found.append(model.generate(ids, max_new_tokens=100, **HOW))
            stats = handle.stats()
            assert (stats.method, stats.captures) == (method, 2 * capture)
    assert torch.equal(*found)


@pytest.mark.parametrize("by_method", [False, True])
def test_prompts_of_every_kind_are_served_beforehand(monkeypatch: pytest.MonkeyPatch, *, by_method: bool) -> None:
    """Whole ones, and one in chunks of which the last is small, under the attention in force and under the method."""
    model = build_exact("llama", max_position_embeddings=4096)
    monkeypatch.setattr("kvthaw.engine.warm.STEP_TOKENS", 1024)
    how: dict[str, Any] = {"full_below": 2500, "device_memory": kv_bytes(model, 9000), **SMALL}
    batch, chunks, prefill = Batch(model, "pariskv-plus", max_seqs=3, capacity=4096, **how), [], Batch.prefill

    def noted(self: Batch, request: Any, tokens: int | None = None) -> bool:
        before = request.prefilled
        got = prefill(self, request, tokens)
        chunks.append((before, request.prefilled, self.stats().method))
        return got

    monkeypatch.setattr(Batch, "prefill", noted)
    _serve(batch, 1, by_method=by_method)
    assert {method for *_, method in chunks} == {"pariskv-plus" if by_method else "full"}
    assert [chunk[:2] for chunk in chunks if not chunk[0]] == [(0, 1000), (0, 685), (0, 1024)]
    start, stop, _ = chunks[-1]
    assert stop - start == 11
    assert not batch.requests


@pytest.mark.gpu
def test_gpu_full_attention_in_blocks(device: torch.device) -> None:
    """Captured for two buckets, and then by the method, with a budget above every length: tokens are those of full attention."""
    model = build("tiny", device).float()
    how: dict[str, Any] = {"max_seqs": 4, "capacity": 8192, "prefill_chunk": 1000, "block_size": 64, "dense_layers": 0}
    room = kv_bytes(model, 4 * 3000 + 4 * 3 * 64)
    batch = Batch(model, "oracle", budget=8192, full_below=3000, device_memory=room, **how)
    full, told, in_force = Batch(model, "full", **how), [], []
    warm(batch)
    for each in (batch, full):
        waiting, requests = [(60, 80), (2000, 90), (1400, 70), (600, 60), (5000, 40), (5400, 40), (300, 50)], []
        while waiting or each.requests:
            while waiting and each.free:
                length, new = waiting.pop(0)
                ids = torch.randint(1, 1000, (length,), generator=torch.Generator().manual_seed(length))
                requests.append(each.join(ids, max_new_tokens=new, stop=()))
            each.step()
            if each is batch:
                in_force.append((batch.cache.kv.chooser.in_blocks, batch.cache.kv.chooser.full))
        told.append([request.tokens for request in requests])
    assert told[0] == told[1]
    assert in_force[0] == (True, True)
    assert (False, False) in in_force


@pytest.mark.gpu
def test_gpu_fewer_sequences_under_the_method(device: torch.device) -> None:
    """Captured before and behind the change, and before another one: tokens are those of full attention."""
    model = build("tiny", device).float()
    how: dict[str, Any] = {"capacity": 2048, "block_size": 64, "dense_layers": 1}
    memory = 7 * sequence_bytes(model, "oracle", 2048, CacheConfig.split({**how, "budget": 2048})[0]) // 2
    some: dict[str, Any] = {"budget": 2048, "full_below": 500, "device_memory": memory}
    schedulers = [
        Scheduler(Batch(model, "oracle", max_seqs=6, **how, **some), step_tokens=500),
        Scheduler(Batch(model, "full", max_seqs=6, **how)),
    ]
    batch, told, seen = schedulers[0].batch, [], set()
    warm(batch)
    for each in schedulers:
        requests = []
        for lengths in ((400, 500, 450, 480, 460, 440, 430), (60, 70, 1500, 300), (30, 40)):
            for n in lengths:
                ids = torch.randint(1, 1000, (n,), generator=torch.Generator().manual_seed(n))
                requests.append(each.submit(ids, max_new_tokens=90, stop=()))
            while each.busy:
                each.step()
                if each.batch is batch:
                    seen.add((batch.cache.kv.chooser.full, batch.max_seqs))
        told.append([request.tokens for request in requests])
    assert told[0] == told[1]
    assert seen == {(True, 6), (False, 3)}


@pytest.mark.gpu
def test_gpu_the_change_with_a_prompt_whose_blocks_lie_on_the_host(device: torch.device) -> None:
    """The method's layers have them on the device all the same."""
    model = build("tiny", device).float()
    how: dict[str, Any] = {"max_seqs": 2, "capacity": 2048, "block_size": 16, "dense_layers": 0}
    batch = Batch(model, "oracle", budget=2048, full_below=700, device_memory=kv_bytes(model, 2000), **how)
    full, requests = Batch(model, "full", **how), []
    for length, room in ((100, 2000), (64, 20), (1500, 20)):
        batch.cache.kv.streams.device.bytes = kv_bytes(model, room)  # as if something else had taken the rest
        ids = torch.randint(1, 1000, (length,), generator=torch.Generator().manual_seed(length))
        while not (batch.free and full.free):
            batch.step()
            full.step()
        requests.append([each.join(ids, max_new_tokens=20, stop=()) for each in (batch, full)])
        for own, _ in requests[-1:]:
            batch.prefill(own)
    while batch.requests or full.requests:
        batch.step()
        full.step()
    assert batch.stats().method == "oracle" or not batch.cache.kv.chooser.full
    assert [own.tokens for own, _ in requests] == [its.tokens for _, its in requests]


def test_a_batch_says_what_it_was_asked_for() -> None:
    """Which method is in force changes with the lengths."""
    model = build_exact("llama")
    named = [
        kvthaw.Batch(model, name, max_seqs=1, capacity=200).method for name in ("auto", "thaw:remainder=32", resolve("prkv"))
    ]
    assert named == ["auto", "thaw", "prkv"]


def test_an_unknown_name_is_told_of_auto_too() -> None:
    with pytest.raises(ConfigError, match=r"'thow'; did you mean 'thaw'\? There are: auto, full"):
        kvthaw.attach(build_exact("llama"), "thow")
