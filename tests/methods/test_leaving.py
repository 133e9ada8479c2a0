"""Work between steps is done once, whoever asks for it and how often: a step that is captured asks before it runs."""

from __future__ import annotations

import pytest
import torch
from one_layer import OneLayer

from kvthaw.methods import METHODS


@pytest.mark.parametrize("method", ["oracle", "clusterkv", "prkv", "quest", "pariskv", "retroinfer", "icecache"])
def test_work_between_steps_is_done_once(method: str) -> None:
    torch.manual_seed(1)
    plain = OneLayer(method, 200, 90)
    torch.manual_seed(1)
    asked = OneLayer(method, 200, 90)
    for _ in range(90):
        for _ in range(2):
            if asked.layer.due():
                asked.layer.before_step()
        assert not asked.layer.due()
        assert asked.step() == plain.step()
        assert torch.equal(asked.out, plain.out)


def test_what_has_left_is_taken_back_by_a_crop_and_by_a_dense_pass() -> None:
    for after in (lambda layer: layer.crop(3), lambda layer: None):
        torch.manual_seed(2)
        plain = OneLayer("oracle", 200, 1200)
        torch.manual_seed(2)
        asked = OneLayer("oracle", 200, 1200)
        for _ in range(30):
            if asked.layer.due():
                asked.layer.before_step()
                after(asked.layer)
                after(plain.layer)
                start = asked.layer.seen
                assert torch.equal(asked.take(start, start + 20), plain.take(start, start + 20))  # too many to go one by one
            assert asked.step() == plain.step()


@pytest.mark.parametrize(
    "method", [name for name in METHODS if name not in ("full", "streaming", "icecache", "icecache-reuse")]
)
def test_nothing_moves_before_the_room_of_a_prompt_is_full(method: str) -> None:
    """A captured step reads by address. What a prompt of 200 makes room for is 456 tokens."""
    one = OneLayer(method, 200, 60)
    one.step()
    addresses = [tensor.data_ptr() for tensor in one.layer.tensors()]
    for _ in range(59):
        one.step()
        assert [tensor.data_ptr() for tensor in one.layer.tensors()] == addresses


def test_what_is_outgrown_moves_at_one_step() -> None:
    one = OneLayer("quest", 200, 300)
    seen = []
    for _ in range(300):
        one.step()
        addresses = [tensor.data_ptr() for tensor in one.layer.tensors()]
        if not seen or seen[-1][1] != addresses:
            seen.append((one.layer.seen, addresses))
    assert [at for at, _ in seen] == [201, 457]
    assert one.layer.capacity == 684


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("full", "streaming")])
def test_going_ahead_changes_nothing(method: str) -> None:
    """Who knows that the next token comes may have its work done while the last one's is under way."""
    torch.manual_seed(3)
    plain = OneLayer(method, 150, 60)
    torch.manual_seed(3)
    ahead = OneLayer(method, 150, 60)
    for _ in range(60):
        assert ahead.step() == plain.step()
        ahead.layer.go_ahead()
        assert not ahead.layer.due()
        assert torch.equal(ahead.out, plain.out)
