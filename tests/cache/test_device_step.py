"""A layer's steps with the kernels that a GPU runs, under the interpreter without one, beside the same steps in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.cache import dense, layer
from kvthaw.cache.clock import Clock
from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.layer import Attention, FrozenLayer
from kvthaw.cache.pipeline import Pipeline
from kvthaw.cache.plan import Settings
from kvthaw.cache.residency import Residency
from kvthaw.cache.transfer import UvaGather
from kvthaw.kernels.admit import admit
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.methods import resolve
from shapes import Shape, close

pytest.importorskip("triton")

SHAPE = Shape(batch=2, heads=2, group=2, head_dim=16)
PADS, PROMPT, STEPS = [0, 25], 30, 5  # lanes of 30 and 5 tokens; a ring goes round within the steps
HOW = Attention(0.3, softcap=5.0, sinks=torch.randn(SHAPE.q_heads))


def device_admit(self: Residency, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return admit(rows.contiguous(), self.row_slot, self.slot_row, self.used, self.counts)


def make(method: str) -> FrozenLayer | DenseLayer:
    if method == "full":
        return DenseLayer(0, Clock())
    return FrozenLayer(0, Settings(resolve(method), budget=24, extent=8), Pipeline(), Clock())


def walk(of: FrozenLayer | DenseLayer, how: Attention) -> list[Tensor]:
    """A prompt, single tokens, and two at once; one of them again as another layer would ask that shares the keys."""
    torch.manual_seed(1)
    q, (k, v) = SHAPE.query(PROMPT + STEPS + 2), (SHAPE.keys(PROMPT + STEPS + 2) for _ in range(2))
    of.attend(q[:, :, :PROMPT], k[:, :, :PROMPT], v[:, :, :PROMPT], PADS, how, True)
    if isinstance(of, FrozenLayer) and of._transfer is not None and layer.sparse_decode is flash_decode:
        of._transfer = UvaGather()
    outs = []
    for at in range(PROMPT, PROMPT + STEPS):
        step = tuple(x[:, :, at : at + 1] for x in (q, k, v))
        outs.append(of.attend(*step, of.left_pad, how, True))
        if at == PROMPT + 1 and isinstance(of, DenseLayer):
            assert torch.equal(of.attend(*step, of.left_pad, how, False), outs[-1])
    outs.append(of.attend(*(x[:, :, PROMPT + STEPS :] for x in (q, k, v)), of.left_pad, how, True))
    return outs


@pytest.mark.parametrize(
    ("method", "how"), [("full", HOW), ("streaming", Attention(0.3)), ("oracle", HOW), ("quest", Attention(0.3))]
)
def test_kernels_and_torch_take_the_same_steps(method: str, how: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_layer, device_layer = make(method), make(method)
    expected = walk(torch_layer, how)
    monkeypatch.setattr(Residency, "admit", device_admit)
    for module in (layer, dense):
        monkeypatch.setattr(module, "sparse_decode", flash_decode)
    found = walk(device_layer, how)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    for lane in range(SHAPE.batch):
        length = device_layer.length(lane)
        assert torch.equal(device_layer.read(lane, length - 3, length), torch_layer.read(lane, length - 3, length))
    if isinstance(device_layer, FrozenLayer) and device_layer.group is not None:
        assert isinstance(torch_layer, FrozenLayer)
        assert torch_layer.group is not None
        assert torch.equal(device_layer.group.residency.counts, torch_layer.group.residency.counts)
        assert device_layer.group.meter.fetched > 0
