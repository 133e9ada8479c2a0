"""The host store against plain lists, and its layout in memory."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvthaw.cache import host_memory
from kvthaw.cache.device_memory import DeviceBlocks, DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import Block, HostMemory, check_host_memory, held_bytes
from kvthaw.cache.page_locked import HUGE
from kvthaw.cache.placement import full_blocks
from kvthaw.cache.plan import default_block_size
from kvthaw.config import KvDtype
from kvthaw.errors import HostMemoryError
from kvthaw.kernels.row_format import row_format
from shapes import DTYPES

HEADS, DIM, BLOCK_SIZE = 2, 3, 4


class Lists:
    """What a store must say: of each sequence the numbers of its rows."""

    def __init__(self, seqs: list[list[int]]) -> None:
        self.seqs = seqs


def rows(numbers: list[int]) -> torch.Tensor:
    """Rows [H, n, 2, D] that tell their numbers, heads and halves apart."""
    base = torch.tensor(numbers, dtype=torch.float32)[None, :, None, None] * 100
    return base + torch.arange(HEADS * 2 * DIM, dtype=torch.float32).reshape(HEADS, 1, 2, DIM)


def shared(store: HostStore) -> HostStore:
    """Another store of the same blocks."""
    twin = HostStore(store.seqs, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE, memory=store.memory)
    for seq in range(store.seqs):
        twin.adopt(seq, store.blocks(seq), store.length(seq))
    return twin


class Stores(RuleBasedStateMachine):
    """Several stores at once, some of them copies of others, each with its lists."""

    stores = Bundle("stores")

    def __init__(self) -> None:
        super().__init__()
        self.known: list[tuple[HostStore, Lists]] = []
        self.next = 0

    def _new(self, store: HostStore, lists: Lists) -> tuple[HostStore, Lists]:
        self.known.append((store, lists))
        return self.known[-1]

    @initialize(target=stores, seqs=st.integers(1, 3))
    def begin(self, seqs: int) -> tuple[HostStore, Lists]:
        return self._new(HostStore(seqs, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE), Lists([[] for _ in range(seqs)]))

    @rule(pair=stores, data=st.data(), count=st.integers(0, 11))
    def append(self, pair: tuple[HostStore, Lists], data: st.DataObject, count: int) -> None:
        store, lists = pair
        seq = data.draw(st.integers(0, store.seqs - 1))
        numbers = list(range(self.next, self.next + count))
        self.next += count
        store.append(seq, rows(numbers))
        lists.seqs[seq] += numbers

    @rule(pair=stores, data=st.data())
    def truncate(self, pair: tuple[HostStore, Lists], data: st.DataObject) -> None:
        store, lists = pair
        seq = data.draw(st.integers(0, store.seqs - 1))
        length = data.draw(st.integers(0, len(lists.seqs[seq])))
        store.truncate(seq, length)
        del lists.seqs[seq][length:]

    @rule(pair=stores, data=st.data())
    def reorder(self, pair: tuple[HostStore, Lists], data: st.DataObject) -> None:
        store, lists = pair
        seqs = data.draw(st.lists(st.integers(0, store.seqs - 1), min_size=1, max_size=4))
        store.reorder(seqs)
        lists.seqs = [list(lists.seqs[seq]) for seq in seqs]

    @rule(target=stores, pair=stores)
    def copied(self, pair: tuple[HostStore, Lists]) -> tuple[HostStore, Lists]:
        return self._new(shared(pair[0]), Lists([list(seq) for seq in pair[1].seqs]))

    @precondition(lambda self: len(self.known) > 1)
    @rule(pair=consumes(stores))
    def dropped(self, pair: tuple[HostStore, Lists]) -> None:
        self.known = [known for known in self.known if known is not pair]

    @invariant()
    def stores_say_what_the_lists_say(self) -> None:
        for store, lists in self.known:
            assert [store.length(seq) for seq in range(store.seqs)] == [len(seq) for seq in lists.seqs]
            table = store.table.on_cpu()
            for seq, numbers in enumerate(lists.seqs):
                assert torch.equal(store.read(seq, 0, len(numbers)), rows(numbers))
                middle = slice(len(numbers) // 3, 2 * len(numbers) // 3)
                assert torch.equal(store.read(seq, middle.start, middle.stop), rows(numbers[middle]))
                addresses = store.table.row(seq)
                assert torch.equal(table[seq, : len(addresses)], addresses)
                assert (table[seq, len(addresses) :] == 0).all()
                assert len(addresses) * BLOCK_SIZE == store.reserved(seq) >= len(numbers)


Stores.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestStores = Stores.TestCase


def test_prefixes_are_shared_until_one_writes() -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.append(0, rows(list(range(10))))
    one = store.nbytes()
    assert one == 3 * BLOCK_SIZE * HEADS * store.row_bytes
    store.reorder([0, 0, 0])
    assert store.nbytes() == one
    version = store.table.version
    store.append(1, rows([50]))
    assert store.nbytes() == one + BLOCK_SIZE * HEADS * store.row_bytes, "only the block that is written into is copied"
    assert store.table.version > version
    assert torch.equal(store.table.row(0)[:2], store.table.row(1)[:2])
    assert torch.equal(store.read(0, 0, 10), store.read(2, 0, 10))
    assert torch.equal(store.read(1, 0, 11), rows([*range(10), 50]))


def test_a_copy_shares_and_is_independent() -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.append(0, rows(list(range(6))))
    twin = shared(store)
    assert torch.equal(store.table.row(0), twin.table.row(0))
    twin.append(0, rows([70]))
    store.append(0, rows([80]))
    assert torch.equal(twin.read(0, 0, 7), rows([*range(6), 70]))
    assert torch.equal(store.read(0, 0, 7), rows([*range(6), 80]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_lies_where_the_addresses_say(dtype: torch.dtype) -> None:
    store = HostStore(2, 3, 8, dtype, block_size=5)
    data = torch.randn(3, 13, 2, 8).to(dtype)
    store.append(1, data)
    assert store.row_bytes == 2 * 8 * dtype.itemsize
    for h, t in ((0, 0), (2, 4), (1, 5), (2, 12)):
        address = int(store.table.row(1)[t // 5]) + (h * 5 + t % 5) * store.row_bytes
        raw = ctypes.string_at(address, store.row_bytes)
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(2, 8), data[h, t])


def test_rows_that_are_not_there() -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.append(0, rows([1, 2, 3]))
    for start, stop in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(IndexError, match=rf"rows {start}\.\.{stop} of sequence 0, which holds 3"):
            store.read(0, start, stop)
    with pytest.raises(IndexError, match=r"sequence 0 holds 3 rows, fewer than 4"):
        store.truncate(0, 4)
    assert store.read(0, 2, 2).shape == (HEADS, 0, 2, DIM)


def test_memory_is_asked_for_before() -> None:
    check_host_memory(100, 100)
    check_host_memory(1, None)
    with pytest.raises(HostMemoryError, match=r"needs 1,001 bytes of host memory and 1,000 are free"):
        check_host_memory(1001, 1000)
    with pytest.raises(HostMemoryError, match=r"are free"):
        check_host_memory(1 << 60, None)


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_that_the_system_does_not_give_is_an_error_that_says_so(pinned: bool) -> None:
    """Without a GPU nothing can be pinned at all; with one, not as much as this."""
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=1 << 50, pinned=pinned)
    words = f"{(1 << 50) * HEADS * 2 * DIM * 4:,} more bytes of {'pinned ' if pinned else ''}host memory could not be allocated"
    with pytest.raises(HostMemoryError, match=words):
        store.append(0, rows([1, 2]))
    assert (store.length(0), store.nbytes()) == (0, 0)


@pytest.mark.gpu
def test_blocks_are_pinned() -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE, pinned=True)
    store.append(0, rows(list(range(9))).cuda(), non_blocking=True)
    torch.cuda.synchronize()
    blocks = full_blocks(store)
    assert len(blocks) == 9 // BLOCK_SIZE > 0
    assert all(block.data.is_pinned() for block in blocks)
    assert torch.equal(store.read(0, 0, 9), rows(list(range(9))))


def test_a_store_shares_the_rows_of_another_until_either_writes() -> None:
    first, second = (HostStore(2, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE) for _ in range(2))
    first.append(0, rows([1, 2, 3, 4, 5, 6]))
    first.append(1, rows([7]))
    second.append(0, rows([9, 9]))
    (old,), version = second.blocks(0), second.table.version
    for seq in range(2):
        second.adopt(seq, first.blocks(seq), first.length(seq))
    assert old.owners == 0
    assert second.table.version > version
    assert [second.length(seq) for seq in range(second.seqs)] == [6, 1]
    assert second.table.row(0).tolist() == first.table.row(0).tolist()
    second.append(0, rows([8]))
    assert torch.equal(second.read(0, 0, 7), rows([1, 2, 3, 4, 5, 6, 8]))
    assert torch.equal(first.read(0, 0, 6), rows([1, 2, 3, 4, 5, 6]))
    assert second.table.row(0)[0] == first.table.row(0)[0]
    assert second.table.row(0)[1] != first.table.row(0)[1]
    first.append(1, rows([10]))
    assert torch.equal(second.read(1, 0, 1), rows([7]))


def test_room_for_rows_that_a_kernel_writes_is_in_blocks_of_ones_own() -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.append(0, rows(list(range(BLOCK_SIZE + 2))))
    store.reorder([0, 0])
    store.claim([(0, BLOCK_SIZE + 3)])
    (whole, part), (others, other) = store.table.row(0).tolist(), store.table.row(1).tolist()
    assert whole == others
    assert part != other


def test_a_block_that_moves_leaves_the_old_one_to_other_stores() -> None:
    store, other = (HostStore(seqs, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE) for seqs in (2, 1))
    store.append(0, rows(list(range(BLOCK_SIZE))))
    store.reorder([0, 0])
    other.adopt(0, store.blocks(0), BLOCK_SIZE)
    (old,) = other.blocks(0)
    new = Block(old.data.clone())
    assert store.replace(old, new)
    assert (old.owners, new.owners) == (1, 2)
    assert not store.replace(old, Block(old.data.clone())), "no sequence has it any more"


def test_a_wait_for_rows_on_their_way_is_for_the_last_of_them_and_once() -> None:
    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    store, events = HostStore(1, 2, 4, torch.float32), [Event(), Event()]
    store.wait()
    assert store.ordered
    store.arrive(events[0], ordered=True)  # type: ignore[arg-type]
    store.arrive(events[1], ordered=False)  # type: ignore[arg-type]
    assert not store.ordered
    store.wait()
    store.wait()
    assert [event.waited for event in events] == [0, 1]
    assert store.ordered
    assert store.arriving is None


def none_to_be_had(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The system gives so many blocks more."""
    real, given = host_memory.host_tensor, iter(range(after))

    def give(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(given, None) is None:
            raise HostMemoryError("no more")
        return real(*args, **kwargs)

    monkeypatch.setattr(host_memory, "host_tensor", give)


def test_what_is_shared_stays_shared_where_there_is_no_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(1, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.append(0, rows([1, 2]))
    store.reorder([0, 0])
    with monkeypatch.context() as patch:
        none_to_be_had(patch, 0)
        with pytest.raises(HostMemoryError):
            store.append(0, rows([3]))
    store.append(0, rows([3]))
    store.append(1, rows([4]))
    assert torch.equal(store.read(0, 0, 3), rows([1, 2, 3]))
    assert torch.equal(store.read(1, 0, 3), rows([1, 2, 4]))


@pytest.mark.gpu
def test_a_limit_counts_what_is_page_locked() -> None:
    memory = HostMemory(1 << 20)
    held = memory.allocate((5 << 10,), torch.int8, pinned=True)
    assert memory.used == 8 << 10
    del held
    assert memory.used == 0


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (10, 128), (32, 96), (32, 80), (5, 64), (3, 112)])
@pytest.mark.parametrize(("kv_dtype", "most"), [(None, 0.07), ("fp8", 0.1)])
def test_blocks_fill_what_is_page_locked_for_them(heads: int, dim: int, kv_dtype: KvDtype | None, most: float) -> None:
    token = heads * row_format(kv_dtype, dim, torch.bfloat16).row_bytes
    size = default_block_size(token) * token
    assert size <= held_bytes(size, pinned=True) <= (1 + most) * size
    assert size > HUGE // 2 or 1024 * token < HUGE, "such blocks are pinned many at a time"


def test_blocks_are_short_where_they_fill_a_huge_page() -> None:
    assert default_block_size(4096) == 512  # 8 heads of 128 dimensions


def test_one_thread_at_a_time_makes_room() -> None:
    """reclaim() drops prefixes of a tree that only one thread may change. Without a lock, layers that are read at once did."""
    memory, kept, inside = HostMemory(64), list[torch.Tensor](), list[int]()

    def reclaim() -> bool:
        inside.append(threading.get_ident())
        time.sleep(0.001)
        assert set(inside[-1:]) == {threading.get_ident()}, "another thread came between"
        inside.append(threading.get_ident())
        return bool(kept) and (kept.pop(), True)[1]

    memory.reclaim = reclaim
    kept += [memory.allocate((8,), torch.uint8, pinned=False) for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: memory.allocate_all(2, (8,), torch.uint8, pinned=False), range(4)))
    assert (len(kept), memory.used) == (0, 64)
    assert len({block.data_ptr() for own in found for block in own}) == 8
    assert all(one == other for one, other in zip(inside[::2], inside[1::2], strict=True))


def test_blocks_lie_on_the_device_while_it_has_room() -> None:
    store = HostStore(2, 1, 4, torch.float32, block_size=2)
    device = DeviceMemory(3 * store.block_bytes, [0])
    device.resolve(torch.device("cpu"))
    store.device = DeviceBlocks(device, 0, store.shape, torch.float32, torch.device("cpu"))
    store.claim([(0, 4)])
    assert (store.room, store.host_need(1), store.host_need(3)) == (1, 0, 2 * store.block_bytes)
    store.claim([(1, 4)])
    assert [block.on_device for seq in (0, 1) for block in store.blocks(seq)] == [True, True, True, False]
    store.truncate(0, 0)
    assert store.room == 2


def test_sequences_get_all_blocks_that_they_ask_for_or_none() -> None:
    """A store that finds no memory for the last of them is as before."""
    store = HostStore(3, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    size = store.block_bytes
    store.memory.limit = 4 * size
    store.claim([(0, 1), (1, BLOCK_SIZE)])
    with pytest.raises(HostMemoryError) as kept:  # and holds no block
        store.claim([(0, BLOCK_SIZE + 1), (2, 2 * BLOCK_SIZE)])
    assert [store.reserved(seq) for seq in range(3)] == [BLOCK_SIZE, BLOCK_SIZE, 0]
    assert store.memory.used == 2 * size, kept
    store.claim([(0, BLOCK_SIZE + 1), (2, BLOCK_SIZE)])
    assert [store.reserved(seq) for seq in range(3)] == [2 * BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE]
    assert len({block.data.data_ptr() for seq in range(3) for block in store.blocks(seq)}) == 4
