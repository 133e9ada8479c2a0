"""thaw: the tolerance, below which rows are estimated instead of read."""

from __future__ import annotations

import pytest

from kvthaw.cache.index_api import Selection
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from kvthaw.testing.layer import Layer, Text
from kvthaw.testing.shapes import Shape

SHAPE = Shape(batch=2, heads=4, group=2, head_dim=32)


def uneven(method: str) -> tuple[Layer, list[Selection]]:
    """Decode a text whose first KV head has long keys, so that its attention is on few tokens."""
    text = Text(SHAPE, [400, 310], 12)
    for tensor in text.tensors[:2]:
        tensor[:, : tensor.shape[1] // 4] *= 4
        tensor[:, tensor.shape[1] // 4 :] *= 0.3
    layer = Layer(resolve(method), text, budget=64).prefill()
    steps = list(layer.decode())
    return layer, [step.choice.selection for step in steps if step.choice is not None]


def test_without_a_tolerance_all_heads_have_as_many() -> None:
    layer, found = uneven("thaw:tolerance=0")
    assert found
    assert all((one.counts == layer.plan.rows).all() for one in found)


def test_rows_of_less_attention_than_the_tolerance_are_estimated() -> None:
    """The first KV head's mass is on few tokens: it needs few rows, and the others as many as before."""
    few, many = uneven("thaw:tolerance=0.01")[1], uneven("thaw:tolerance=0.000001")[1]
    assert sum(int(one.counts.sum()) for one in few) < sum(int(one.counts.sum()) for one in many)
    for one, every in zip(few, many, strict=True):
        assert (one.counts <= every.counts).all()
        for rows, among in zip(one.rows.flatten(0, 1).tolist(), every.rows.flatten(0, 1).tolist(), strict=True):
            assert {row for row in rows if row >= 0} <= set(among)


def test_a_tolerance_bounds_what_each_row_that_is_left_out_weighs() -> None:
    """By the exact softmax over all tokens, from which the estimate by 4-bit codes differs, most in a head of long keys."""
    layer, found = uneven("thaw:tolerance=0.01")
    text = layer.text
    for number, one in enumerate(found):
        for seq, left in enumerate(text.pads):
            q, k, _ = (x[seq, :, left : left + [400, 310][seq] + number + 1].float() for x in text.tensors)
            logits = q[:, -1].view(SHAPE.heads, -1, 1, SHAPE.head_dim) @ k[:, None].mT * layer.how.scale
            share = logits.softmax(dim=3).amax(dim=(1, 2))
            for head in range(1, SHAPE.heads):
                rows = one.rows[seq, head]
                read = share[head, rows[rows >= 0].long()]
                assert (read > 0.005).all()
                kept = share[head, layer.plan.regions.sink : -layer.plan.regions.held].topk(len(read) + 1).values
                assert float(kept[-1]) < 0.02 or len(read) == layer.plan.rows


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"tolerance is 1\.5"):
        Layer(resolve("thaw:tolerance=1.5"), Text(SHAPE, [290], 2), budget=64).prefill()
    with pytest.raises(ConfigError, match="with policy='mean_query' it must be 0"):
        Layer(resolve("thaw:policy=mean_query"), Text(SHAPE, [90], 2), budget=64).prefill()
