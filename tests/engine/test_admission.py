"""A request that is admitted has all memory that it may need until its end: blocks are counted as they are allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvthaw import Batch, HostMemoryError, PrefixCache, Scheduler
from kvthaw.cache import host_memory
from kvthaw.config import Crossing
from kvthaw.engine import admission
from kvthaw.engine.library import Library
from zoo import build, prompt

BLOCK, SIZE = 24, 24 * 2 * 2 * 16 * 4  # tokens; bytes in a layer, three quarters of a power of two
HELD = 1 << (SIZE - 1).bit_length()
LAYERS = 2
ASKED = st.lists(st.tuples(st.integers(30, 100), st.integers(1, 24)), min_size=3, max_size=5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama", num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what is page-locked is more than a small block."""
    for module in (host_memory, admission):
        monkeypatch.setattr(module, "held_bytes", lambda size, *, pinned: host_memory.locked_bytes(size))


def serve(model: PreTrainedModel, asked: list[tuple[int, int]], prefix: PrefixCache | None, **sizes: Any) -> tuple[int, int]:
    """Serve random prompts. Returns how many were refused, and preempted."""
    batch = Batch(model, "quest", max_seqs=3, capacity=130, budget=32, block_size=BLOCK, prefix_cache=prefix, **sizes)
    scheduler, refused, requests = Scheduler(batch, step_tokens=64), 0, []
    same, first = prompt(1, 100)[0], scheduler.submit([1, 2, 3], max_new_tokens=1, stop=())  # the first prompt tells the sizes
    while not first.finished:
        scheduler.step()
    for number, (tokens, new) in enumerate(asked):
        ids = same[:tokens] if number % 2 else prompt(1, tokens, seed=number)[0]
        try:
            requests.append(scheduler.submit(ids, max_new_tokens=new, stop=()))
        except HostMemoryError:
            refused += 1
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    assert [request.error for request in requests] == [None] * len(requests)
    assert all(request.finished == "length" for request in requests)
    return refused, scheduler.preemptions


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(asked=ASKED, host=st.integers(4, 10), device=st.sampled_from([None, 0, 3, 5]), keeps=st.booleans())
@example(asked=[(72, 24), (40, 3), (60, 4)], host=4, device=None, keeps=True)  # all blocks, and one for a copy
@torch.no_grad()
def test_no_request_that_was_admitted_is_preempted(
    model: PreTrainedModel, asked: list[tuple[int, int]], host: int, device: int | None, keeps: bool
) -> None:
    sizes: dict[str, Any] = {"host_bytes": LAYERS * host * HELD}
    if device is not None:
        fixed = Batch(model, "quest", max_seqs=3, capacity=130, budget=32, block_size=BLOCK)
        fixed.prefill(fixed.join([1, 2, 3], max_new_tokens=1, stop=()))
        sizes["device_memory"] = LAYERS * (device * SIZE + SIZE // 2) + sum(one.fixed_bytes() for one in fixed.cache.kv.layers)
    prefix = PrefixCache(host_bytes=1 << 30) if keeps else None
    refused, preempted = serve(model, asked, prefix, **sizes)
    assert preempted == 0
    room = host - keeps / LAYERS + (device or 0)
    assert refused == sum(-(-sum(one) // BLOCK) > room for one in asked)


@pytest.mark.parametrize("settings", [{"method": "quest"}, {"method": "auto", "full_below": 64}])
@torch.no_grad()
def test_entries_with_a_name_refuse_nobody_for_good(
    model: PreTrainedModel, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the prefix cache may have more memory than the batch: the longest request is served beside as many as there may be,
    and after a restart that finds more of them, too."""

    def batch_of(host: int) -> Batch:
        kept = PrefixCache(host_bytes=1 << 30)
        sizes = {"max_seqs": 2, "capacity": 130, "block_size": BLOCK, "host_bytes": LAYERS * host * HELD}
        return Batch(model, prefix_cache=kept, budget=32, **sizes, **settings)

    def served(batch: Batch, tokens: int, new: int, **how: Any) -> Exception | None:
        scheduler = Scheduler(batch)
        request = scheduler.submit(prompt(1, tokens, seed=tokens)[0], max_new_tokens=new, stop=(), **how)
        while scheduler.busy:
            scheduler.step()
        return request.error

    small, large = batch_of(11), batch_of(100)  # the longest request takes 6 blocks, and one for a copy
    for batch, kept in (small, 2), (large, 4):
        errors = [served(batch, tokens, 1, name=str(tokens)) for tokens in range(40, 44)]
        assert errors[:kept] == [None] * kept
        assert all("too little host memory" in str(error) for error in errors[kept:])
    assert served(small, 100, 30) is None
    library = Library(large.cache, large.prefix_cache, tmp_path)
    for salt, name in large.prefix_cache.entries:
        library.save(name, salt)
    restarted = batch_of(11)
    assert served(restarted, 3, 1) is None
    with caplog.at_level("WARNING"):
        Library(restarted.cache, restarted.prefix_cache, tmp_path, restarted.admission.leaves_room).restore()
    assert caplog.text.count("too little host memory") == 2
    assert served(restarted, 100, 30) is None


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_full_attention_goes_on_while_its_blocks_fit_the_device(spare: int) -> None:
    """Blocks that are allocated ahead must not push others to the host, after which the method would take over."""
    model = build("llama", num_hidden_layers=2)
    config, seqs, size = model.config, 32, 64
    token = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4 * config.num_hidden_layers
    sizes = {"max_seqs": seqs, "capacity": 320, "block_size": size, "budget": 64}
    held = seqs * Batch(model, "oracle", **sizes).cache.settings.plan(0).regions.held
    memory = ((2 * seqs + spare) * size + held) * token  # two blocks for each request
    batch = Batch(model, "oracle", **sizes, device_memory=memory, full_below=Crossing(((1, 2000),)))
    scheduler = Scheduler(batch)
    requests = [scheduler.submit(prompt(1, 100, seed=i)[0], max_new_tokens=28, stop=()) for i in range(seqs)]
    while scheduler.busy:
        scheduler.step()
        assert batch.cache.kv.chooser.in_blocks or not batch.requests
        stores = [layer.store for layer in batch.cache.kv.offloaded if layer.plan]
        assert all(block.on_device for store in stores for seq in range(seqs) for block in store.blocks(seq))
    assert scheduler.preemptions == 0
    assert all(len(request.tokens) == 28 for request in requests)
