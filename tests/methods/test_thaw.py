"""thaw: KV heads that share the rows of a layer, and the estimate of what none of them selected."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache.choice import check_selection
from kvthaw.cache.index_api import Selection
from kvthaw.errors import CacheError, ConfigError
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


def test_a_head_with_flat_attention_takes_rows_that_another_does_not_need() -> None:
    layer, found = uneven("thaw:head_limit=2")
    rows = layer.plan.rows
    assert found
    for one in found:
        assert one.rows.shape[2] == 2 * rows
        assert (one.counts.sum(dim=1) == rows * SHAPE.heads).all()
        assert (one.counts[:, 0] < rows // 2).all()
        assert int(one.counts.max()) > rows


def test_without_it_all_heads_have_as_many() -> None:
    layer, found = uneven("thaw")
    assert all((one.counts == layer.plan.rows).all() for one in found)


def test_shared_rows_hold_more_of_the_attention() -> None:
    """Of the exact softmax over all tokens, summed over all heads."""
    mass = {}
    for method in ("pariskv-plus", "pariskv-plus:head_limit=2"):
        layer, found = uneven(method)
        text, total = layer.text, 0.0
        for number, one in enumerate(found):
            for seq, left in enumerate(text.pads):
                stop = left + [400, 310][seq] + number + 1
                q, k, _ = (x[seq, :, left:stop].float() for x in text.tensors)
                logits = q[:, -1].view(SHAPE.heads, -1, 1, SHAPE.head_dim) @ k[:, None].mT * layer.how.scale
                share = logits.softmax(dim=3).sum(dim=(1, 2))
                for head in range(SHAPE.heads):
                    rows = one.rows[seq, head]
                    total += float(share[head, rows[rows >= 0].long()].sum())
        mass[method] = total
    assert mass["pariskv-plus:head_limit=2"] > 1.03 * mass["pariskv-plus"]


@pytest.mark.parametrize("method", ["thaw:tolerance=0.01", "thaw:tolerance=0.01:head_limit=2"])
def test_rows_of_less_attention_than_the_tolerance_are_estimated(method: str) -> None:
    """The first KV head's mass is on few tokens: it needs few rows, and the others as many as before."""
    few, many = uneven(method)[1], uneven(method.replace("0.01", "0.000001"))[1]
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
    with pytest.raises(ConfigError, match="head_limit is 0"):
        resolve("thaw:head_limit=0")
    with pytest.raises(ConfigError, match="with policy='each' they must be 1 and 0"):
        Layer(resolve("pariskv-plus:head_limit=2:policy=each"), Text(SHAPE, [90], 2), budget=64).prefill()
    with pytest.raises(ConfigError, match="must be at least the"):
        Layer(resolve("thaw:head_limit=2:candidates=20"), Text(SHAPE, [290], 2), budget=64).prefill()


def test_more_rows_than_the_heads_have_together_are_refused() -> None:
    layer, _ = uneven("thaw:head_limit=2")
    rows = torch.arange(8, 8 + 2 * layer.plan.rows, dtype=torch.int32).expand(2, SHAPE.heads, -1).contiguous()
    found = Selection(rows, torch.full((2, SHAPE.heads), rows.shape[2], dtype=torch.int32))
    ends = torch.tensor([300, 300])
    with pytest.raises(CacheError, match=r"select .* rows together"):
        check_selection(found, "it", layer.retriever.context, 2, layer.plan.rows, 2, ends)
