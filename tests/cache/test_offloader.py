"""What leaves rings goes to the stores of all layers; tokens before a chunk of a prompt come back in order, from store and ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw.cache import host_memory
from kvthaw.cache.device_memory import DeviceBlocks, DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.layer_storage import LayerStorage, offload, offload_prompts
from kvthaw.cache.pool import Slab
from kvthaw.cache.step import Row
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.regions import Regions


def test_the_past_is_in_order_from_store_and_ring() -> None:
    rows, store = torch.randn(2, 20, 2, 4), HostStore(1, 2, 4, torch.float32, block_size=4)
    slab = Slab(1, 2, 4, Regions(2, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
    slab.write(0, 0, rows[:, :2])
    slab.write(0, 12, rows[:, 12:])
    store.append(0, rows[:, :14])
    past = list(LayerStorage(store, slab, Streams()).past(0, 20, queries=4))
    assert torch.equal(torch.cat([keys[0] for keys, _ in past], dim=1), rows[:, :, 0])
    assert torch.equal(torch.cat([values[0] for _, values in past], dim=1), rows[:, :, 1])


def test_a_ring_is_filled_again_as_far_as_the_store_goes() -> None:
    rows, store = torch.randn(2, 20, 2, 4), HostStore(1, 2, 4, torch.float32, block_size=4)
    slab = Slab(1, 2, 4, Regions(2, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
    slab.write(0, 14, rows[:, 14:])
    store.append(0, rows[:, :14])
    LayerStorage(store, slab, Streams()).refill(0, 12, 20)
    assert torch.equal(slab.read(0, 12, 20), rows[:, 12:])


def layers(count: int, seqs: int = 2) -> list[LayerStorage]:
    """Layers of sequences whose first 14 tokens are stored; the ring has 12 .. 20."""
    made = []
    for _ in range(count):
        store = HostStore(seqs, 2, 4, torch.float32, block_size=7)
        slab = Slab(seqs, 2, 4, Regions(2, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
        slab.data.normal_()
        for seq in range(seqs):
            store.append(seq, torch.cat([slab.read(seq, 0, 2), torch.randn(2, 10, 2, 4), slab.read(seq, 12, 14)], dim=1))
        made.append(LayerStorage(store, slab, Streams()))
    return made


def test_what_leaves_the_rings_of_layers_is_stored_and_returned() -> None:
    three = layers(3)
    found = offload(three, [(0, 12, 18, 14), (1, 12, 18, 18)])  # the second sequence's are stored in part already, and stay so
    for layer, rows in zip(three, found, strict=True):
        assert [layer.store.length(seq) for seq in range(2)] == [18, 14]
        assert torch.equal(layer.store.read(0, 0, 18)[:, 12:], rows[0])
        for seq in range(2):
            assert torch.equal(rows[seq], layer.slab.read(seq, 12, 18))
        assert [layer.ahead(seq, 12) for seq in range(2)] == [True, False]


def test_what_was_offloaded_ahead_is_known_after_a_reorder_and_a_rewind() -> None:
    (layer,) = layers(1)
    offload([layer], [(0, 12, 18, 14)])
    layer.rewind(layer.marks())
    assert [layer.ahead(seq, 12) for seq in range(2)] == [True, False]
    layer.reorder([1, 0])
    assert [layer.ahead(seq, 12) for seq in range(2)] == [False, True]
    layer.rollback(1, 12, 20, failed=False)
    assert [layer.store.length(seq) for seq in range(2)] == [14, 14]


def test_where_one_layer_finds_no_memory_none_is_said_to_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    three, spans = layers(3), [(seq, 12, 18, 14) for seq in range(2)]
    real, given = host_memory.host_tensor, iter(range(3))

    def give(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(given, None) is None:
            raise HostMemoryError("no more")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "host_tensor", give)
        with pytest.raises(HostMemoryError):
            offload(three, spans)
    assert [layer.store.length(seq) for layer in three for seq in range(2)] == [14] * 6
    for layer, rows in zip(three, offload(three, spans), strict=True):
        for seq in range(2):
            assert torch.equal(layer.store.read(seq, 12, 18), rows[seq])


def test_a_sequence_that_is_cleared_gives_back_the_blocks_of_a_prompt_that_failed() -> None:
    (layer,) = layers(1)
    layer.truncate(1, 0)
    with pytest.raises(RuntimeError):
        layer.store.append(1, torch.randn(2, 20, 2, 5))  # as long as blocks, in which it does not fit
    layer.truncate(1, 0)
    assert layer.store.nbytes() == layer.store.nbytes(0)


@pytest.mark.parametrize("have", [14, 17])  # a kept prefix may reach into the piece
def test_a_piece_of_a_prompt_is_stored_in_all_layers(have: int) -> None:
    three, rows = layers(3), torch.randn(3, 2, 9, 2, 4)
    for layer, own in zip(three, rows, strict=True):
        layer.store.append(1, own[:, : have - 14])
    offload_prompts(three, [Row(0, 1, 0, 9, 14)], rows)
    for layer, own in zip(three, rows, strict=True):
        assert [layer.store.length(seq) for seq in range(2)] == [14, 23]
        assert torch.equal(layer.store.read(1, 14, 23), own)
        assert torch.equal(layer.store.read(1, 12, 14), layer.slab.read(1, 12, 14)), "nothing before it has changed"


def test_where_one_layer_finds_no_memory_for_a_prompt_none_keeps_any(monkeypatch: pytest.MonkeyPatch) -> None:
    three, rows = layers(3), torch.randn(3, 2, 9, 2, 4)
    for layer in three:
        layer.store.truncate(1, 0)
    real, given = host_memory.host_tensor, iter(range(5))

    def give(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(given, None) is None:
            raise HostMemoryError("no more")
        return real(*args, **kwargs)

    before = [layer.store.nbytes() for layer in three]
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "host_tensor", give)
        with pytest.raises(HostMemoryError):
            offload_prompts(three, [Row(0, 1, 0, 9, 0)], rows)
    assert [layer.store.nbytes() for layer in three] == before
    assert [layer.store.length(1) for layer in three] == [0] * 3


def test_layers_get_a_prompts_next_block_only_together() -> None:
    """What is known of the first layer's blocks is taken for all layers."""
    three, rows, cpu = layers(3), torch.randn(3, 2, 9, 2, 4), torch.device("cpu")
    for number, layer in enumerate(three):
        memory = DeviceMemory((3 - (number == 1)) * layer.store.block_bytes, (number,))
        layer.store.device = DeviceBlocks(memory, number, layer.store.shape, torch.float32, cpu)
    offload_prompts(three, [Row(0, 1, 0, 9, 14)], rows, {1: 40})
    assert [layer.store.reserved(1) for layer in three] == [28] * 3


@pytest.mark.parametrize(
    ("room", "until", "blocks"),
    [(3, {1: 40}, 5), (3, {1: 25}, 4), (9, {1: 1000}, 5), (2, {1: 40}, 4), (0, {1: 40}, 4), (3, {0: 40}, 4), (3, {}, 4)],
)
def test_a_prompt_gets_the_next_block_that_it_will_need_if_the_device_has_room(
    room: int, until: dict[int, int], blocks: int
) -> None:
    three, rows, cpu = layers(3), torch.randn(3, 2, 9, 2, 4), torch.device("cpu")
    size = three[0].store.block_bytes
    memory = DeviceMemory(3 * room * size, range(3))
    for number, layer in enumerate(three):
        layer.store.device = DeviceBlocks(memory, number, layer.store.shape, torch.float32, cpu)
    offload_prompts(three, [Row(0, 1, 0, 9, 14)], rows, until)
    for layer, own in zip(three, rows, strict=True):
        assert layer.store.length(1) == 23
        assert layer.store.reserved(1) == 7 * blocks
        assert sum(block.on_device for block in layer.store.blocks(1)) == min(room, blocks - 2)
        assert torch.equal(layer.store.read(1, 14, 23), own)
