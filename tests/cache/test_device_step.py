"""A layer's steps with the kernels that a GPU runs, under the interpreter without one, beside the same steps in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.cache import device_layers, sparse_attention
from kvthaw.cache.choice import UvaGather
from kvthaw.cache.device_layers import DenseLayer, WindowLayer
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.pool import Residency
from kvthaw.config import KvDtype
from kvthaw.kernels.admit import Placed, admit
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.kernels.local import Span
from kvthaw.methods import resolve
from shapes import Shape, close

pytest.importorskip("triton")

SHAPE = Shape(batch=2, heads=1, group=3, head_dim=16)
PADS, PROMPT, STEPS = [0, 25], 30, 4  # sequences of 30 and 5 tokens; a ring goes round within the steps
HOW = AttentionParams(0.3, softcap=5.0, sinks=torch.randn(SHAPE.q_heads))


WINDOWS = {"window": Span(9), "chunks": Span(7, chunked=True)}


def device_admit(self: Residency, rows: Tensor, *, blocks: tuple[Tensor, int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    placed = None if blocks is None else Placed(*blocks, self.latest)
    return admit(rows.contiguous(), self.row_slot, self.slot_row, self.used, self.counts, placed)


def make(method: str, memory: int | None = None, kv_dtype: KvDtype | None = None) -> KVCache:
    if method in WINDOWS:
        return KVCache(Settings(resolve("full")), [], 1, {0: WINDOWS[method]})
    budget = None if method == "full" else 24
    return KVCache(Settings(resolve(method), budget=budget, block_size=8, device_memory=memory, kv_dtype=kv_dtype), [0], 1)


def walk(cache: KVCache, how: AttentionParams, room: int | None = None) -> list[Tensor]:
    """A prompt, single tokens, and five at once; some of them again as another layer would ask that shares the keys. room: bytes of
    device memory from the prompt on."""
    torch.manual_seed(1)
    of = cache.layers[0]
    q, (k, v) = SHAPE.query(PROMPT + STEPS + 5), (SHAPE.keys(PROMPT + STEPS + 5) for _ in range(2))
    cache.attend(of, q[:, :, :PROMPT], k[:, :, :PROMPT], v[:, :, :PROMPT], how, PADS)
    if isinstance(of, OffloadedLayer) and of.retriever is not None and sparse_attention.sparse_decode is flash_decode:
        of.sparse.transfer, of.storage.tabled = UvaGather(), True
    if room is not None:
        cache.streams.device.bytes = room
    outs = []
    for at in range(PROMPT, PROMPT + STEPS):
        step = tuple(x[:, :, at : at + 1] for x in (q, k, v))
        outs.append(cache.attend(of, *step, how))
        if at == PROMPT + 1 and isinstance(of, DenseLayer | WindowLayer):
            assert torch.equal(cache.attend_again(of, *step, how), outs[-1])
    several = tuple(x[:, :, PROMPT + STEPS :] for x in (q, k, v))
    outs.append(cache.attend(of, *several, how))
    if isinstance(of, DenseLayer | WindowLayer):
        assert torch.equal(cache.attend_again(of, *several, how), outs[-1])
    return outs


@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_of_a_window_that_fail_behind_it_are_taken_again(window: str, tokens: int) -> None:
    """A second layer fails; the ring goes round, and others come."""
    torch.manual_seed(2)
    both, total = {0: WINDOWS[window], 1: WINDOWS[window]}, PROMPT + tokens + 1
    cache, plain = (KVCache(Settings(resolve("full")), [], 2, dict(both)) for _ in range(2))
    q, (k, v) = SHAPE.query(total), (SHAPE.keys(total) for _ in range(2))

    def take(of: KVCache, start: int, stop: int) -> Tensor:
        some = tuple(x[:, :, start:stop] for x in (q, k, v))
        return torch.stack([of.attend(layer, *some, HOW, PADS if not start else None) for layer in of.layers])

    for of in (cache, plain):
        take(of, 0, PROMPT)
    others = tuple(torch.randn_like(x[:, :, :tokens]) for x in (q, k, v))
    cache.attend(cache.layers[0], *others, HOW)
    for start, stop in ((PROMPT, PROMPT + tokens), (PROMPT + tokens, total)):
        close(take(cache, start, stop), take(plain, start, stop))


@pytest.mark.parametrize(
    ("method", "how"),
    [("full", HOW), ("streaming", AttentionParams(0.3)), ("oracle", HOW), ("window", HOW), ("chunks", AttentionParams(0.3))],
)
def test_kernels_and_torch_take_the_same_steps(method: str, how: AttentionParams, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cache, device_cache = make(method), make(method)
    expected = walk(torch_cache, how)
    monkeypatch.setattr(Residency, "admit", device_admit)
    for module in (sparse_attention, device_layers):
        monkeypatch.setattr(module, "sparse_decode", flash_decode)
    found = walk(device_cache, how)
    torch_layer, device_layer = torch_cache.layers[0], device_cache.layers[0]
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    for seq in range(SHAPE.batch):
        length = device_layer.length(seq)
        assert torch.equal(device_layer.read(seq, length - 3, length), torch_layer.read(seq, length - 3, length))
    if isinstance(device_layer, OffloadedLayer) and device_layer.retriever is not None:
        assert isinstance(torch_layer, OffloadedLayer)
        assert torch_layer.retriever is not None
        assert torch.equal(device_layer.retriever.residency.counts, torch_layer.retriever.residency.counts)
        assert device_layer.retriever.residency.counted().fetched > 0


@pytest.mark.parametrize(
    ("room", "kv_dtype"), [(1 << 20, None), (1, None), (1, "fp8")], ids=["all on the device", "blocks spill", "of 8 bits"]
)
def test_rows_are_read_in_their_blocks(room: int, kv_dtype: KvDtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, cache = walk(make("oracle", kv_dtype=kv_dtype), HOW), make("oracle", 1 << 20, kv_dtype)
    monkeypatch.setattr(Residency, "admit", device_admit)
    monkeypatch.setattr(sparse_attention, "sparse_decode", flash_decode)
    for ours, theirs in zip(walk(cache, HOW, room), expected, strict=True):
        close(ours, theirs)
    stats = cache.stats()
    assert stats.device_rate is not None
    if room > 1:
        assert (stats.device_rate, stats.hit_rate, stats.kv_host_bytes) == (1.0, 1.0, 0)
    else:
        assert stats.device_rate < 1
        assert stats.fetched_bytes > 0


@pytest.mark.parametrize("method", ["full", "oracle", "streaming"])
def test_a_layer_may_share_another_s_keys_before_the_last_layer(method: str) -> None:
    """Attending again in the middle of a step sees the step's token, and changes no later step."""
    torch.manual_seed(0)
    shape, how = Shape(batch=2, heads=1, group=3, head_dim=16), AttentionParams(0.3)
    query, keys, values = shape.query(60), shape.keys(60), shape.keys(60)

    def outputs(*, again: bool) -> list[torch.Tensor]:
        budget = None if method == "full" else 24
        cache, found = KVCache(Settings(resolve(method), budget=budget, block_size=8), [0, 1], 2), list[torch.Tensor]()
        for start, end in [(0, 30), *((i, i + 1) for i in range(30, 60))]:
            given = query[:, :, start:end], keys[:, :, start:end], values[:, :, start:end]
            pads = [0, 0] if start == 0 else None
            found.append(cache.attend(cache.layers[0], *given, how, pads))
            if again:
                close(cache.attend_again(cache.layers[0], *given, how), found[-1])
            found.append(cache.attend(cache.layers[1], *given, how, pads))
        return found

    for one, expected in zip(outputs(again=True), outputs(again=False), strict=True):
        close(one, expected)
