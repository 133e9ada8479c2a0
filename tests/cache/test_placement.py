"""Blocks lie on the device while there is room, spill to the host and come back; on a CPU the device is the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import host_memory
from kvthaw.cache import placement as module
from kvthaw.cache.choice import UvaGather
from kvthaw.cache.device_memory import DeviceBlocks, DeviceMemory
from kvthaw.cache.host_memory import Block
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.passes import check_memory
from kvthaw.cache.placement import count_by_block, full_blocks
from kvthaw.cache.plan import Settings
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from stand_in import StandIn, captured_by
from zoo import prompt

LAYERS, BLOCK, HEADS, DIM = 2, 8, 2, 4
HOW = AttentionParams(0.5)
SIZE = HEADS * BLOCK * 2 * DIM * 4  # bytes of a block


class ModelCache(SimpleNamespace):
    """What a runner needs of a transformers cache."""


class Tokens:
    """The queries, keys and values of coming tokens, of several layers."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, seqs: int, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        shape = seqs, HEADS, tokens, DIM
        return [tuple(torch.randn(shape, generator=self.generator) for _ in range(3)) for _ in range(LAYERS)]


def make(method: str = "oracle", **more: Any) -> KVCache:
    """A cache with a small ring, whose budget is every row unless `more` says otherwise."""
    chosen, size = resolve(method), {} if method == "full" or "budget" in more else {"retrieved": 500}
    chosen = chosen if chosen.dense else replace(chosen, regions=Regions(2, 6, 4))
    return KVCache(Settings(chosen, block_size=BLOCK, **size, **more), range(LAYERS), LAYERS)


def take(cache: KVCache, tokens: list[tuple[torch.Tensor, ...]], pads: list[int] | None = None) -> list[torch.Tensor]:
    pads = cache.sequences.left_pad or pads or [0] * len(tokens[0][0])
    return [cache.attend(layer, *qkv, HOW, pads) for layer, qkv in zip(cache.layers, tokens, strict=True)]


def blocks(cache: KVCache, layer: int = 0) -> tuple[int, int]:
    """How many blocks of a layer lie on the device and on the host."""
    store = cache.offloaded[layer].store
    return store.nbytes(on_device=True) // SIZE, store.nbytes() // SIZE


def room_for(cache: KVCache, count: int) -> None:
    """Give every layer room for so many blocks."""
    device = cache.streams.device
    device.bytes = LAYERS * (max(device.fixed.values()) + count * SIZE)


class Spilling(RuleBasedStateMachine):
    """A cache whose device memory comes and goes, beside one that attends to everything."""

    @initialize(seqs=st.integers(1, 3), tokens=st.integers(10, 60), room=st.integers(0, 30), pad=st.integers(0, 9))
    def begin(self, seqs: int, tokens: int, room: int, pad: int) -> None:
        self.tokens, self.seqs = Tokens(), seqs
        self.cache, self.full = make(device_memory=1), make("full")
        self.cache.streams.device.bytes = 1 << 20 if room else 1
        self._take(tokens, [pad] + [0] * (seqs - 1))
        room_for(self.cache, room)

    def _take(self, tokens: int, pads: list[int] | None = None) -> None:
        drawn = self.tokens.draw(self.seqs, tokens)
        for found, expected in zip(take(self.cache, drawn, pads), take(self.full, drawn, pads), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @rule(steps=st.integers(1, 20))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._take(1)

    @rule(tokens=st.integers(20, 40))
    def continue_dense(self, tokens: int) -> None:
        self._take(tokens)

    @rule(room=st.integers(0, 60))
    def change_room(self, room: int) -> None:
        room_for(self.cache, room)

    @precondition(lambda self: self.cache.sequences.padded_length > 30)
    @rule(drop=st.integers(1, 20))
    def crop(self, drop: int) -> None:
        self.cache.crop(drop)
        self.full.crop(drop)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, self.seqs - 1), min_size=1, max_size=3))
        self.seqs = len(order)
        self.cache.reorder(order)
        self.full.reorder(order)

    @rule()
    def fork(self) -> None:
        """Go on with a copy; the blocks of both stay shared."""
        self.before, self.cache, self.full = self.cache, copy.deepcopy(self.cache), copy.deepcopy(self.full)

    @rule()
    def fail(self) -> None:
        """A step fails in the last layer and is repeated."""
        drawn = self.tokens.draw(self.seqs, 1)
        self.cache.attend(self.cache.layers[0], *drawn[0], HOW, self.cache.sequences.left_pad)
        with pytest.raises(RuntimeError):
            self.cache.attend(self.cache.layers[1], *(x[..., :2] for x in drawn[1]), HOW)
        for found, expected in zip(take(self.cache, drawn), take(self.full, drawn), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @invariant()
    def tables_say_where_blocks_lie(self) -> None:
        for layer in self.cache.offloaded if hasattr(self, "cache") else ():
            store = layer.store
            table = store.table.on(torch.device("cpu"))
            for seq in range(store.seqs):
                addresses = store.table.row(seq)
                assert torch.equal(table[seq, : len(addresses)], addresses)


Spilling.TestCase.settings = settings(max_examples=5, stateful_step_count=10, deadline=None)
TestSpilling = Spilling.TestCase


def test_blocks_go_to_the_device_while_there_is_room_and_then_to_the_host() -> None:
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(1, 40))
    assert blocks(cache) == (5, 0)
    room_for(cache, 6)
    take(cache, tokens.draw(1, 60))
    assert blocks(cache) == (6, 7)
    assert cache.stats().kv_host_bytes == LAYERS * 7 * SIZE


def test_a_prompt_tells_the_device_where_its_blocks_are() -> None:
    """The step that follows need not."""
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(2, 40))
    for layer in cache.offloaded:
        written, table = layer.store.table.on_cpu(), layer.store.table.addresses
        assert table is not None
        torch.testing.assert_close(table[:, : written.shape[1]], written)


def test_stats_tell_rows_by_place() -> None:
    """Of every block each row is selected by the first step, and stays in the pool."""
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(1, 40))
    room_for(cache, 5)
    take(cache, tokens.draw(1, 40))
    take(cache, tokens.draw(1, 1))
    stats, retrieved = cache.stats(), 80 - 2 - 6
    assert stats.device_rate == pytest.approx((40 - 2) / retrieved)
    assert stats.fetched_bytes == LAYERS * HEADS * (retrieved - 38) * 2 * DIM * 4
    assert (stats.device_block_bytes, stats.moved_bytes) == (LAYERS * 5 * SIZE, 0)


def test_the_oldest_spill_behind_the_steps_where_nothing_tells_them_apart_and_come_back() -> None:
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(1, 40))
    room_for(cache, 4)
    for _ in range(40):
        take(cache, tokens.draw(1, 1))
        assert sum(blocks(cache)) <= 12
    on_device = [block.on_device for block in full_blocks(cache.offloaded[0].store)]
    assert on_device == sorted(on_device), "new blocks are on the device, old ones on the host"
    assert 0 < sum(on_device) <= 4
    room_for(cache, 60)
    for _ in range(40):
        take(cache, tokens.draw(1, 1))
    assert blocks(cache)[1] == 0
    assert cache.stats().moved_bytes > 0


def test_a_host_block_whose_copy_took_its_place_is_free_at_once() -> None:
    """Where no kernel may still read it, that is on a CPU. A cache that takes no further step held its memory for good."""
    cache, tokens = make(device_memory="1MiB", host_bytes=LAYERS * 20 * SIZE), Tokens()
    memory = cache.streams.memory
    take(cache, tokens.draw(1, 40))
    room_for(cache, 4)
    for _ in range(40):
        take(cache, tokens.draw(1, 1))
    room_for(cache, 60)
    for _ in range(40):
        take(cache, tokens.draw(1, 1))
        assert memory.used == sum(layer.store.nbytes() for layer in cache.offloaded)
    assert memory.used == 0


def test_replayed_steps_find_blocks_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their table is right before each replay though nothing is captured again."""
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(2, 40))
    room_for(cache, 30)  # not for all tokens that may come
    monkeypatch.setattr(UvaGather, "fetch", lambda *args: None)  # a kernel
    for layer in cache.offloaded:
        layer.sparse.transfer, layer.storage.tabled = UvaGather(), True
        layer.room = 0  # so that it makes room for the table

    def forward(**kwargs: Any) -> Any:
        take(cache, tokens.draw(2, 1))
        return SimpleNamespace(logits=torch.zeros(1))

    class Reads(StandIn):
        def replay(self) -> None:
            for store in (layer.store for layer in cache.offloaded):
                table = store.table.addresses
                assert table is not None
                assert torch.equal(table[:, : store.table.on_cpu().shape[1]], store.table.on_cpu())
                assert torch.equal(store.table.on_host[:, : store.table.which_on_host().shape[1]], store.table.which_on_host())

    captured_by(monkeypatch, Reads)
    of: Any = ModelCache(kv=cache, adapters=dict, argument="past_key_values")
    runner, token = ElasticGraph(forward, of), torch.zeros((2, 1), dtype=torch.int64)
    for step in range(90):
        if step in (10, 40):
            room_for(cache, 5 if step == 10 else 60)
        runner(token, token)
    assert cache.stats().moved_bytes > 0
    assert blocks(cache)[1] == 0
    assert runner.captures == 1


def test_tokens_are_those_of_a_dynamic_cache(llama: PreTrainedModel) -> None:
    """With all blocks on the device, and with room for half of them."""
    ids, how = prompt(1, 90), {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected, memory = llama.generate(ids, **how), 1 << 30
    for _ in range(2):
        with kvthaw.attach(llama, "oracle", budget=4096, block_size=16, device_memory=memory) as handle:
            assert torch.equal(llama.generate(ids, **how), expected)
            stats = handle.stats()
            memory = sum(handle.cache.kv.streams.device.fixed.values()) + stats.device_block_bytes // 2
    assert stats.device_block_bytes > 0
    assert stats.kv_host_bytes > 0
    assert stats.moved_bytes > 0


def test_what_is_recalled_stays() -> None:
    """With a budget of few rows, and queries that look at the first block alone."""
    cache, tokens = make(budget=32, device_memory="1MiB"), Tokens()
    drawn = tokens.draw(1, 100)
    for _, key, _ in drawn:
        key[:, :, 8:16] = 5.0
    take(cache, drawn)
    room_for(cache, 6)
    for _ in range(60):
        step = tokens.draw(1, 1)
        take(cache, [(torch.ones_like(q), k, v) for q, k, v in step])
    on_device = [block.on_device for block in full_blocks(cache.offloaded[0].store)]
    assert on_device[1]
    assert not on_device[0]


def test_earlier_recalls_count_half() -> None:
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(1, 60))
    storage = cache.offloaded[0].storage
    placement = storage.placement
    assert placement is not None
    room_for(cache, 0)
    for recalled in (range(8), range(8, 16), range(8, 16)):
        placement.balance(1, torch.tensor(list(recalled), dtype=torch.int32).expand(1, HEADS, -1))
    assert [block.recalls for block in storage.store.blocks(0)[:3]] == [4 * HEADS, 4 * HEADS, 0]


def test_blocks_that_a_copy_shares_stay_since_moving_them_frees_nothing() -> None:
    cache, tokens = make(device_memory="1MiB"), Tokens()
    take(cache, tokens.draw(1, 40))
    twin = copy.deepcopy(cache)
    room_for(cache, 2)
    for _ in range(8):
        take(cache, tokens.draw(1, 1))
    assert cache.stats().moved_bytes == 0
    assert blocks(twin) == (5, 0)


def test_a_method_that_searches_on_the_host_keeps_its_blocks_there() -> None:
    cache = make("icecache", device_memory="1MiB")
    take(cache, Tokens().draw(1, 60))
    assert blocks(cache)[0] == 0


def test_index_slab_and_dense_layers_count() -> None:
    cache = KVCache(Settings(resolve("oracle"), budget=64, block_size=BLOCK, dense_layers=1, device_memory=1 << 20), [0, 1], 2)
    take(cache, Tokens().draw(1, 60))
    device = cache.streams.device
    fixed = sum(layer.fixed_bytes() for layer in cache.layers)
    assert fixed > 0
    assert device.share(1) == (1 << 20) - fixed


def test_where_the_host_has_no_memory_blocks_stay_and_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tokens = make(device_memory="1MiB"), Tokens()
    full = make("full")
    drawn = tokens.draw(2, 40)
    take(cache, drawn), take(full, drawn)

    def none(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise HostMemoryError("no more")

    monkeypatch.setattr(host_memory, "host_tensor", none)
    room_for(cache, 13)
    for _ in range(8):
        drawn = tokens.draw(2, 1)
        for found, expected in zip(take(cache, drawn), take(full, drawn), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert blocks(cache)[1] == 0


def test_where_the_device_has_no_memory_blocks_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(memory: DeviceMemory, device: torch.device, work: Any) -> Any:
        made = work()
        if isinstance(made, torch.Tensor):  # a chunk of blocks; a layer is allocated by a function that returns nothing
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DeviceMemory, "allocate", none)
    cache = make(device_memory="1MiB")
    take(cache, Tokens().draw(1, 40))
    assert blocks(cache)[0] == 0


def test_host_memory_is_needed_for_what_the_device_has_no_room_for() -> None:
    cache = make(device_memory=1 << 20, host_bytes=3 * SIZE * LAYERS)
    check_memory(cache.offloaded, cache.streams, 9, SIZE, torch.device("cpu"))
    with pytest.raises(HostMemoryError):
        check_memory(cache.offloaded, cache.streams, 10_000, SIZE, torch.device("cpu"))
    tokens = Tokens()
    take(cache, tokens.draw(1, 40))
    room_for(cache, 6)
    steps = (take(cache, tokens.draw(1, 1)) for _ in range(80))
    with pytest.raises(HostMemoryError):
        list(steps)
    room_for(cache, 60)
    take(cache, tokens.draw(1, 1))


def test_a_copy_begun_before_a_block_was_written_to_takes_nobodys_place() -> None:
    """Nor where a later copy of the block is under way, which has all of it."""
    cache = make(device_memory=1 << 20)
    take(cache, Tokens().draw(1, 20))
    store, placement = cache.offloaded[0].store, cache.offloaded[0].storage.placement
    assert placement is not None
    block, stored = store.blocks(0)[-1], store.length(0)
    assert stored % BLOCK
    assert placement._move(block, placement._to_host)
    rows = torch.randn((HEADS, BLOCK - stored % BLOCK, 2, DIM))
    store.append(0, rows)
    assert placement._move(block, placement._to_host)
    placement.finish()
    assert store.blocks(0)[-1] is not block
    assert torch.equal(store.read(0, stored, store.length(0)), rows)


def test_a_freed_block_is_used_again_at_its_address() -> None:
    memory = DeviceMemory(1 << 20, [0])
    blocks_of = DeviceBlocks(memory, 0, (2, 3), torch.float32, torch.device("cpu"))
    some = [blocks_of.take(1)[0] for _ in range(20)]
    addresses = {block.data_ptr() for block in some}
    assert len(addresses) == 20
    del some
    more = [blocks_of.take(1)[0] for _ in range(32)]
    assert addresses <= {block.data_ptr() for block in more}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(0, 0), (5, 5), ("8GiB", 8 << 30), ("1.5 mb", 3 << 19), ("100", 100), ("auto", "auto"), (None, None)],
)
def test_sizes_are_bytes_or_text(given: Any, expected: Any) -> None:
    assert Settings(resolve("oracle"), device_memory=given).device_memory == expected


@pytest.mark.parametrize("given", ["much", "8 gigs", -1, "GiB"])
def test_other_sizes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="device_memory is"):
        Settings(resolve("oracle"), device_memory=given)


def test_recalled_rows_are_counted_by_block() -> None:
    rows = torch.tensor([[[0, 7, 8, -1], [16, 9, -1, -1]], [[23, 23, -1, 80], [1, 2, 3, 4]]], dtype=torch.int32)
    assert count_by_block(rows, 8, 3).tolist() == [[2, 2, 1, 3], [4, 0, 2, 2]]


def test_what_counts_them_is_loaded_before_a_block_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module, "count_by_block", lambda *of: (calls.append(1), count_by_block(*of))[1])
    for room, loaded in (("1GiB", 0), (LAYERS * 3 * SIZE, 1)):
        module._load_kernels.cache_clear()
        cache = make(device_memory=room)
        take(cache, Tokens().draw(1, 60))
        assert len(calls) == loaded


def test_where_blocks_may_lie_is_known_before_a_step_and_not_changed_by_reading() -> None:
    """It decides which tensors a step has: the layers of one step must not differ in it."""
    cache, tokens = make(device_memory=1 << 30), Tokens()
    take(cache, tokens.draw(1, 60))
    take(cache, tokens.draw(1, 1))
    device, layer = cache.streams.device, cache.offloaded[0]
    assert not device.spills
    block = layer.store.blocks(0)[0]
    layer.store.replace(block, Block(block.data.clone()))
    cache.attend(layer, *tokens.draw(1, 1)[0], HOW, [0])
    assert not device.spills, "in mid-step"
    layer.storage.update_table()  # as before_step() does
    assert device.spills
