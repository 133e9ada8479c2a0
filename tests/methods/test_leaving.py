"""Work between steps is done once, whoever asks for it and how often: a step that is captured asks before it runs."""

from __future__ import annotations

import pytest
import torch
from one_layer import OneLayer


@pytest.mark.parametrize("method", ["oracle", "clusterkv", "prkv", "quest", "pariskv", "icecache"])
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
