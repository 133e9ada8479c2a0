"""Host memory for coming tokens is pinned on a background thread before they come."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvthaw.cache import host_memory, page_locked, passes
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
        *,
        block_size: int = BLOCK_SIZE,
        layers: int = LAYERS,
        replayed: bool,
    ) -> None:
        self.kv = KVCache(Settings(resolve("oracle"), budget=64, block_size=block_size), range(LAYERS), layers)
        self.pads, self.how = [0] * SEQS, AttentionParams(0.3)
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

    def expected(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Number and bytes of the blocks that a background thread shall pin, as each step says them."""
        asked = list[tuple[int, int]]()
        monkeypatch.setattr(HostMemory, "expect", lambda self, count, size: asked.append((count, size)))
        for store in self.stores:
            monkeypatch.setattr(store, "pinned", True)
        return asked


SIZE = HEADS * BLOCK_SIZE * 2 * DIM * 4


def taken(stack: Stack, blocks: Blocks, steps: int) -> list[int]:
    """Blocks that each step took."""
    counts = []
    for _ in range(steps):
        before = blocks.given
        stack.step()
        counts.append(blocks.given - before)
    return counts


def test_what_sequences_need_soon_is_pinned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every layer and sequence, from some steps before the ring needs a block until it has one."""
    stack = Stack(monkeypatch, replayed=False)
    store, window = stack.stores[0], stack.layers[0].plan.regions.window
    asked, early, late = stack.expected(monkeypatch), list[int](), list[int]()
    for _ in range(70):
        left = store.reserved(0) + window - stack.kv.sequences.padded_length  # steps after which the ring asks for a block
        passes.look_ahead(stack.layers, stack.kv.sequences, 0)
        (late if asked else early).append(left)
        assert asked in ([], [(LAYERS * SEQS, SIZE)])
        asked.clear()
        with monkeypatch.context() as patch:
            for each in stack.stores:
                patch.setattr(each, "pinned", False)
            stack.step()
    assert min(early) > max(late) >= min(LAYERS * SEQS, BLOCK_SIZE // 2) - 2
    assert min(late) <= 0


def test_only_what_lies_in_page_locked_memory_is_pinned_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 20 layers offloads four of them, two of which have other blocks. Sequences that have left need none."""
    stack = Stack(monkeypatch, block_size=64, layers=20, replayed=False)
    stack.kv.clear(1)
    asked = stack.expected(monkeypatch)
    for store in stack.stores[:2]:
        monkeypatch.setattr(store, "shape", (HEADS, 64, 2, 2 * DIM))
    passes.look_ahead(stack.layers, stack.kv.sequences, 0)
    assert sorted(asked) == [(2 * (SEQS - 1), 4 * SIZE), (2 * (SEQS - 1), 8 * SIZE)]
    for seq in range(SEQS):
        stack.kv.sequences.ends[seq] = 60
    asked.clear()
    passes.look_ahead(stack.layers, stack.kv.sequences, 0)
    assert not asked, "no sequence outgrows its blocks"


@pytest.mark.parametrize("replayed", [True, False])
def test_where_memory_is_short_it_is_an_error_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, replayed: bool) -> None:
    blocks = Blocks(monkeypatch)
    stack = Stack(monkeypatch, replayed=replayed)
    blocks.left = 5
    with pytest.raises(HostMemoryError):
        taken(stack, blocks, 60)
    assert blocks.left == 0
    window = stack.layers[0].plan.regions.window
    assert stack.kv.sequences.padded_length > stack.stores[0].block_size * 3 + window, "not before it is needed"
    blocks.left = 1000
    counts = taken(stack, blocks, 100)  # the token that failed is not counted, and comes again
    assert counts[0] == LAYERS * SEQS - 5 // SEQS * SEQS, "a layer keeps all blocks that it needs, or none"


def test_in_a_capture_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(monkeypatch, replayed=False)
    asked = stack.expected(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        stack.kv.after_step()
    assert not asked


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
