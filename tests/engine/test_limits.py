"""host_bytes is a limit, and a budget takes no more memory than there can be tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.errors import HostMemoryError
from zoo import build, prompt

IDS = prompt(1, 200)
BLOCK = 16
BLOCK_BYTES = 2 * BLOCK * 2 * 16 * 4 * 2  # a block of all layers: heads, tokens, K and V, dimensions, float32


def forward(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


def room(step: Callable[[], object]) -> bool:
    """Whether there is host memory for a step."""
    try:
        step()
    except HostMemoryError:
        return False
    return True


def limited(model: PreTrainedModel, method: str, blocks: int) -> kvthaw.Cache:
    return kvthaw.Cache(model, method, budget=64, block_size=BLOCK, host_bytes=blocks * BLOCK_BYTES)


@pytest.mark.parametrize("block_size", [16, 1024])
def test_a_prompt_is_refused_by_the_blocks_that_it_takes(llama: PreTrainedModel, block_size: int) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64, block_size=block_size, host_bytes=5 * BLOCK_BYTES)
    with pytest.raises(HostMemoryError, match="host memory"):
        forward(llama, cache, IDS[:, :81] if block_size == 16 else IDS[:, :60])
    assert cache.stats().kv_host_bytes == 0


@pytest.mark.parametrize(
    ("architecture", "method", "inference"),
    [
        ("llama", "oracle", True),
        ("llama", "icecache-digest", False),
        ("gemma3", "oracle", False),
        ("gemma3", "icecache-digest", True),
    ],
)
def test_decoding_stops_at_the_limit_and_goes_on_after_a_crop(architecture: str, method: str, inference: bool) -> None:
    model = build(architecture)
    blocks = 6  # of two full-attention layers, which Gemma has among four
    with torch.inference_mode(inference), kvthaw.attach(model, method, budget=64):
        cache, free = limited(model, method, blocks), kvthaw.Cache(model, method, budget=64, block_size=BLOCK)
        for one in (cache, free):
            forward(model, one, IDS[:, :80])
        steps = 0
        while room(partial(forward, model, cache, IDS[:, steps : steps + 1])):
            forward(model, free, IDS[:, steps : steps + 1])
            steps += 1
        assert 16 <= steps < 100
        for _ in range(2):
            assert cache.get_seq_length() == 80 + steps
            with pytest.raises(HostMemoryError):
                forward(model, cache, IDS[:, steps : steps + 1])
        assert 0 < cache.stats().kv_host_bytes <= blocks * BLOCK_BYTES
        if architecture == "llama":
            for one in (cache, free):
                one.crop(-20)
            assert torch.allclose(forward(model, cache, IDS[:, :1]), forward(model, free, IDS[:, :1]), atol=1e-4)


def test_a_batch_goes_on_when_a_request_has_left(llama: PreTrainedModel) -> None:
    def batch(host_bytes: int | None) -> kvthaw.Batch:
        settings = {"budget": 64, "block_size": BLOCK, "host_bytes": host_bytes}
        return kvthaw.Batch(llama, "oracle", max_seqs=2, capacity=300, **settings)

    tight, alone = batch(12 * BLOCK_BYTES), batch(None)
    expected = alone.join(IDS[:, :80], max_new_tokens=60, stop=[])
    kept, leaves = (tight.join(ids, max_new_tokens=60, stop=[]) for ids in (IDS[:, :80], IDS[:, 100:180]))
    for request in (kept, leaves):
        tight.prefill(request)
    while room(tight.step):
        pass
    assert kept.finished is leaves.finished is None
    tight.leave(leaves)
    while not kept.finished:
        tight.step()
        assert tight.stats().kv_host_bytes <= 12 * BLOCK_BYTES
    while not expected.finished:
        alone.step()
    assert kept.tokens == expected.tokens
    large = tight.join(IDS[:, :193], max_new_tokens=2, stop=[])
    with pytest.raises(HostMemoryError):
        tight.prefill(large)


@pytest.mark.parametrize("method", ["oracle", "icecache-digest", "streaming"])
def test_a_huge_budget_takes_no_more_than_the_positions_there_are(llama: PreTrainedModel, method: str) -> None:
    with kvthaw.attach(llama, method, budget=10**9) as handle:
        llama.generate(IDS[:, :60], max_new_tokens=3)
        assert handle.stats().kv_device_bytes < 2 * 2 * 2 * 16 * 4 * (512 + 256)
