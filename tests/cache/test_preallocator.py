"""Host memory for coming tokens is taken before they come, a little behind every step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvthaw.cache import choice, host_memory, page_locked, passes
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.page_locked import PageLocked
from kvthaw.cache.plan import Settings
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.errors import HostMemoryError
from kvthaw.methods import resolve
from stand_in import StandIn, captured_by

LAYERS, SEQS, BLOCK_SIZE, HEADS, DIM = 4, 3, 16, 1, 4
PROMPT = 45


class Blocks:
    """Counts what the system gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given, self.left = 0, 1 << 30
        self.real = host_memory.host_tensor
        monkeypatch.setattr(host_memory, "host_tensor", self.give)

    def give(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.left:
            raise HostMemoryError("no more")
        self.given, self.left = self.given + 1, self.left - 1
        return self.real(*args, **kwargs)


class Cache(SimpleNamespace):
    """What a runner needs of a transformers cache."""


class Stack:
    """Some layers and what decodes with them, on a CPU; replayed: the step is captured by a stand-in, whose replays do nothing."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: str = "oracle",
        *,
        pads: list[int] | None = None,
        block_size: int = BLOCK_SIZE,
        layers: int = LAYERS,
        replayed: bool,
    ) -> None:
        self.kv = KVCache(Settings(resolve(method), budget=64, block_size=block_size), range(LAYERS), layers)
        self.pads, self.how = pads or [0] * SEQS, AttentionParams(0.3)
        self.cache: Any = Cache(kv=self.kv, adapters=dict, argument="past_key_values")
        self._take(PROMPT)
        self.replay = ElasticGraph(self._forward, self.cache, capture=replayed)
        captured_by(monkeypatch, StandIn)

    def _take(self, tokens: int) -> None:
        pads = self.kv.sequences.left_pad or self.pads
        for layer in self.layers:
            q, k, v = (torch.randn(len(pads), HEADS, tokens, DIM) for _ in range(3))
            self.kv.attend(layer, q, k, v, self.how, pads)

    @property
    def layers(self) -> list[Any]:
        return self.kv.offloaded

    def _forward(self, **kwargs: Any) -> Any:
        self._take(1)
        return SimpleNamespace(logits=torch.zeros(1))

    def step(self) -> None:
        token = torch.zeros((self.kv.sequences.count, 1), dtype=torch.int64)
        self.replay(token, token)

    @property
    def stores(self) -> list[HostStore]:
        return [layer.store for layer in self.layers]

    def spares(self) -> int:
        """How many there are, at most one a sequence and layer."""
        assert all(set(store.allocator.ahead) <= set(range(store.seqs)) for store in self.stores)
        return sum(len(store.allocator.ahead) for store in self.stores)


def taken(stack: Stack, blocks: Blocks, steps: int) -> list[int]:
    """Blocks that each step took."""
    counts = []
    for _ in range(steps):
        before = blocks.given
        stack.step()
        counts.append(blocks.given - before)
    return counts


@pytest.mark.parametrize(
    ("replayed", "steps", "pads", "burst"),
    [(True, 200, [0] * SEQS, LAYERS * SEQS), (True, 200, [0, 5, 22], 2 * LAYERS), (False, 70, [0, 5, 22], 2 * LAYERS)],
)
def test_no_step_takes_more_than_two_blocks(
    monkeypatch: pytest.MonkeyPatch, replayed: bool, steps: int, pads: list[int], burst: int
) -> None:
    """And addresses change as often as they do where all are taken when they are needed, by every sequence of every layer at
    once."""
    blocks = Blocks(monkeypatch)
    ahead = Stack(monkeypatch, pads=pads, replayed=replayed)
    counts = taken(ahead, blocks, steps)
    needed = sum(len(store.table.row(seq)) for store in ahead.stores for seq in range(SEQS))
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "after_step", lambda self: None)
        late = Stack(monkeypatch, pads=pads, replayed=replayed)
        late_counts = taken(late, blocks, steps)
    assert max(late_counts) == burst
    assert max(counts) <= 2
    assert sum(counts) == sum(late_counts) + ahead.spares()
    assert needed == sum(len(store.table.row(seq)) for store in late.stores for seq in range(SEQS))
    assert [store.table.version for store in ahead.stores] == [store.table.version for store in late.stores]


def test_one_row_takes_one_at_a_time_and_not_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 48 tokens and the ring: there is time enough not to take any yet."""
    blocks = Blocks(monkeypatch)
    stack = Stack(monkeypatch, pads=[0], replayed=True)
    window = stack.layers[0].plan.regions.window
    early = taken(stack, blocks, 48 + window + 1 - PROMPT - LAYERS)
    assert set(early) == {0}
    assert max(taken(stack, blocks, 200)) == 1


def test_a_prompt_takes_what_is_needed_before_every_sequence_has_had_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(monkeypatch)
    stack = Stack(monkeypatch, block_size=64, layers=20, replayed=True)
    assert stack.spares() == LAYERS * SEQS
    assert max(taken(stack, blocks, 200)) <= 2
    fewer = Stack(monkeypatch, block_size=64, replayed=True)
    assert fewer.spares() == 0
    assert max(taken(fewer, blocks, 200)) <= 2


def test_idle_sequences_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(monkeypatch)
    idle = Stack(monkeypatch, block_size=64, layers=20, replayed=True)  # of which there are so many that turns are far apart
    idle.kv.clear(1)
    taken(idle, blocks, 100)
    assert all(len(store.table.row(1)) == 0 and 1 not in store.allocator.ahead for store in idle.stores)


@pytest.mark.parametrize("replayed", [True, False])
def test_where_memory_is_short_it_is_said_once_and_an_error_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replayed: bool
) -> None:
    blocks = Blocks(monkeypatch)
    stack = Stack(monkeypatch, replayed=replayed)
    blocks.left = 5
    with caplog.at_level(logging.WARNING), pytest.raises(HostMemoryError):
        taken(stack, blocks, 60)
    assert blocks.left == 0
    assert len([record for record in caplog.records if "allocated ahead" in record.message]) == 1
    window = stack.layers[0].plan.regions.window
    assert stack.kv.sequences.padded_length > stack.stores[0].block_size * 3 + window, "not before it is needed"
    blocks.left = 1000
    counts = taken(stack, blocks, 100)  # the token that failed is not counted, and comes again
    assert counts[0] == LAYERS * SEQS - 5
    assert max(counts[1:]) <= 2


def test_a_store_takes_one_and_gives_it_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(monkeypatch)
    store = HostStore(2, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    rows = torch.randn(HEADS, 40, 2, DIM)
    store.append(0, rows[:, :10])
    size, version, table = store.nbytes(), store.table.version, store.table.on_cpu()
    for _ in range(2):
        store.allocator.preallocate(0)
    assert (blocks.given, store.nbytes(0), store.nbytes()) == (2, size, 2 * size)
    assert (store.table.version, store.table.on_cpu()) == (version, table)
    store.append(0, rows[:, 10:20])
    assert (blocks.given, store.nbytes()) == (2, 2 * size)
    assert torch.equal(store.read(0, 0, 20), rows[:, :20])


def test_without_memory_a_sequence_takes_what_another_has_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(monkeypatch)
    store = HostStore(2, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    store.allocator.preallocate(1)
    blocks.left = 0
    store.append(0, torch.ones(HEADS, 3, 2, DIM))
    assert store.length(0) == 3
    with pytest.raises(HostMemoryError):
        store.append(1, torch.ones(HEADS, 3, 2, DIM))
    assert store.length(1) == 0


def shared(store: HostStore) -> HostStore:
    """Another store of the same blocks."""
    twin = HostStore(store.seqs, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    twin.share(store)
    return twin


CHANGES: dict[str, tuple[Callable[[HostStore], Any], set[int]]] = {
    "cleared": (lambda store: store.truncate(0, 0), {1}),
    "cropped": (lambda store: store.truncate(0, 3), {0, 1}),
    "cropped, nothing to spare": (lambda store: (store.allocator.ahead.clear(), store.truncate(0, 3)), {0}),
    "cropped, shared": (lambda store: (store.allocator.ahead.clear(), store.reorder([0, 0]), store.truncate(0, 3)), set()),
    "reordered": (lambda store: store.reorder([1, 0]), {0, 1}),
    "fewer": (lambda store: store.reorder([1]), {0}),
    "more": (lambda store: store.reorder([0, 0, 1]), {0, 1}),
    "shared": (lambda store: store.share(shared(store)), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_spares_after_a_change(change: str) -> None:
    """No two sequences write into one, whatever happens to the sequences."""
    do, left = CHANGES[change]
    store = HostStore(2, HEADS, DIM, torch.float32, block_size=BLOCK_SIZE)
    for seq in range(2):
        store.append(seq, torch.full((HEADS, 40, 2, DIM), float(seq)))
        store.allocator.preallocate(seq)
    do(store)
    assert set(store.allocator.ahead) == left
    want = [store.read(seq, 0, store.length(seq)).clone() for seq in range(store.seqs)]
    for seq in range(store.seqs):
        more = torch.full((HEADS, 50, 2, DIM), 10.0 + seq)
        store.append(seq, more)
        want[seq] = torch.cat((want[seq], more), dim=1)
    for seq in range(store.seqs):
        assert torch.equal(store.read(seq, 0, store.length(seq)), want[seq])
    assert not shared(store).allocator.ahead


@pytest.mark.parametrize("replayed", [True, False])
def test_a_crop_a_clear_and_other_places_between_steps(monkeypatch: pytest.MonkeyPatch, replayed: bool) -> None:
    """Afterwards steps take no more than before, but for blocks that sequences share and each writes into."""
    blocks = Blocks(monkeypatch)
    stack = Stack(monkeypatch, replayed=replayed)
    taken(stack, blocks, 40)
    for drop in (1, 9, 30):
        stack.kv.crop(drop)
        assert max(taken(stack, blocks, 24)) <= 2
    stack.kv.reorder([2, 0, 1])
    assert max(taken(stack, blocks, 24)) <= 2
    stack.kv.reorder([0, 0])
    counts = taken(stack, blocks, 30)
    assert sum(count > 2 for count in counts) <= 1


def test_in_a_capture_nothing_is_taken_and_no_turn_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step is captured here, of layers whose blocks are page-locked."""
    blocks, within = Blocks(monkeypatch), [False]
    stack = Stack(monkeypatch, replayed=True)
    give = blocks.give

    class Capture(StandIn):
        def __enter__(self) -> StandIn:
            within[0] = True
            return self

        def __exit__(self, *error: object) -> None:
            within[0] = False

    class Watches:
        """An observer, for whom the step is captured again."""

        graph_safe = True

        def __call__(self, *step: object) -> None:
            pass

    def locked(*args: Any, pinned: bool, **kwargs: Any) -> torch.Tensor:
        assert pinned
        assert not within[0]
        return give(*args, pinned=False, **kwargs)

    captured_by(monkeypatch, Capture)
    monkeypatch.setattr(host_memory, "host_tensor", locked)
    monkeypatch.setattr(choice, "host_tensor", lambda *args, pinned: blocks.real(*args, pinned=False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: within[0])
    for store in stack.stores:
        store.allocator.pinned = True
    counts = []
    for _ in range(24):
        stack.kv.streams.observers[:] = [Watches()]
        counts += taken(stack, blocks, 3)
    assert stack.replay.captures > 20  # but where tables grow
    assert stack.stores[0].reserved(0) > 90
    assert max(counts) <= 2


def test_no_more_is_pinned_than_every_sequence_needs_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 20 layers offloads four of them, two of which have other blocks."""
    stack = Stack(monkeypatch, layers=20, replayed=False)
    kept = list[tuple[int, int]]()
    monkeypatch.setattr(HostMemory, "expect", lambda self, count, size, half: kept.append((count, size)))
    for store in stack.stores:
        monkeypatch.setattr(store.allocator, "pinned", True)
    for store in stack.stores[:2]:
        monkeypatch.setattr(store.allocator, "shape", (HEADS, BLOCK_SIZE, 2, 2 * DIM))
    passes.preallocate(stack.layers, stack.kv.sequences, 0)  # nothing is due
    assert not kept
    monkeypatch.setattr(passes, "_preallocate", lambda layer, seq, length: True)
    monkeypatch.setattr(stack.kv.sequences, "decoded", 1000)
    passes.preallocate(stack.layers, stack.kv.sequences, 0)
    size = HEADS * BLOCK_SIZE * 2 * DIM * 4
    assert sorted(kept) == [(2 * SEQS, size), (2 * SEQS, 2 * size)]


@pytest.mark.gpu
def test_gpu_a_thread_pins_the_blocks_of_coming_steps(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """After the first steps, the thread that takes steps pins nothing."""
    pinned = list[tuple[bool, int]]()
    real, main, memory = page_locked.page_lock, threading.current_thread(), PageLocked(lambda: None)

    def counted(size: int, blocks: int, runtime: Any) -> Any:
        pinned.append((threading.current_thread() is main, blocks))
        return real(size, blocks, runtime)

    monkeypatch.setattr(page_locked, "page_lock", counted)
    monkeypatch.setattr(host_memory, "_page_locked", memory)
    kv = KVCache(Settings(resolve("oracle"), budget=64, block_size=512), range(4), 4)
    how = AttentionParams(0.3)

    def take(tokens: int) -> None:
        for layer in kv.offloaded:
            q, k, v = (torch.randn(6, heads, tokens, 128, device=device).bfloat16() for heads in (8, 8, 8))
            kv.attend(layer, q, k, v, how, [0] * 6)

    with torch.inference_mode():
        take(600)
        pinned.clear()
        for _ in range(900):
            take(1)
            kv.after_step()
            kv.streams.drain()
    own = [blocks for here, blocks in pinned if here]
    assert sum(own) <= 1, "the first block, before the need was known"
    assert sum(blocks for here, blocks in pinned if not here) >= 6 * 4
