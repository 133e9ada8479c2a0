"""What layers store and index of a short prompt, all at once, is what each would alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvthaw
from kvthaw.cache import passes
from kvthaw.cache.chooser import FullLayer
from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.prefill import prefill
from kvthaw.kernels.encode import encode
from kvthaw.kernels.freeze import definition
from zoo import build, prompt


def held(kv: KVCache, seqs: int) -> list[torch.Tensor]:
    """Sinks, rings and rows of all layers."""
    found = []
    for layer in kv.layers:
        assert isinstance(layer, OffloadedLayer)
        found += [layer.slab.held()] + [layer.store.read(i, 0, layer.store.length(i)) for i in range(seqs)]
    return found


def serve(llama: PreTrainedModel, name: str, **settings: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Two requests that join one after the other, prompts in chunks: their tokens and what the cache holds at the end."""
    batch = kvthaw.Batch(llama, name, max_seqs=2, capacity=200, prefill_chunk=70, budget=48, dense_layers=0, **settings)
    requests = [batch.join(prompt(1, n, seed=n)[0], max_new_tokens=30, stop=()) for n in (150, 33)]
    while not all(len(request.tokens) > 6 for request in requests):
        batch.step()
    batch.cache.wait()
    return [list(request.tokens) for request in requests], held(batch.cache.kv, 2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in ("pariskv-plus", "clusterkv-plus", "snapkv", "infinigen", "streaming")]
    + [("prkv", {"kv_dtype": "fp8"}), ("clusterkv-plus", {"block_size": 16, "device_memory": 1 << 14})],
)
def test_layers_are_as_if_each_had_stored_its_own(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llama = build("llama", num_hidden_layers=3)
    together = serve(llama, name, **settings)
    monkeypatch.setattr(passes, "SHORT", 0)
    alone = serve(llama, name, **settings)
    assert together[0] == alone[0]
    for mine, theirs in zip(together[1], alone[1], strict=True):
        assert torch.equal(mine, theirs)


def test_a_prompt_is_offloaded_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(slabs: Sequence[torch.Tensor], *args: Any, **how: Any) -> None:
        calls.append(len(slabs))
        definition(slabs, *args, **how)

    monkeypatch.setattr("kvthaw.cache.layer_storage.freeze_definition", counted)
    model = build("llama", num_hidden_layers=5)
    batch = kvthaw.Batch(model, "pariskv-plus", max_seqs=2, capacity=200, budget=48, dense_layers=2)
    batch.prefill(batch.join(prompt(1, 90)[0]))
    assert calls == [3]


def test_a_long_chunk_brings_the_addresses_of_all_layers_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy would wait for the KV of the layers that follow, which is on its way meanwhile."""
    sent = []

    def upload(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sent.append(len(numbers))
        return torch.tensor(numbers, dtype=dtype, device=device)

    monkeypatch.setattr(passes, "SHORT", 0)
    monkeypatch.setattr("kvthaw.cache.host.upload", upload)
    model = build("llama", num_hidden_layers=5)
    some: dict[str, Any] = {"budget": 48, "dense_layers": 0, "block_size": 16, "full_below": 200}
    device = 5 * 1200 * 2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize  # of 3 * 500 tokens
    batch = kvthaw.Batch(model, "pariskv-plus", max_seqs=3, capacity=500, device_memory=device, **some)
    request = batch.join(prompt(1, 150)[0])
    batch.prefill(request, 60)
    batch.prefill(request, 70)
    assert all(isinstance(layer, FullLayer) for layer in batch.cache.kv.offloaded), "attended to where it lies"
    assert len(sent) == 2
    for layer in batch.cache.kv.offloaded:
        blocks = [block.data.data_ptr() for block in layer.store.blocks(0)]
        table = layer.store.table.addresses
        assert table is not None
        assert table[0, : len(blocks)].tolist() == blocks


def test_codes_of_all_layers_are_written_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(keys: torch.Tensor, *args: Any) -> None:
        calls.append(len(keys))
        encode(keys, *args)

    monkeypatch.setattr("kvthaw.index.codes.encode", counted)
    model = build("llama", num_hidden_layers=5)
    batch = kvthaw.Batch(model, "pariskv-plus", max_seqs=2, capacity=200, budget=48, dense_layers=2)
    requests = [batch.join(prompt(1, n)[0], max_new_tokens=30, stop=()) for n in (90, 40)]
    for _ in requests:
        batch.step()
    assert calls == [3, 3]
    while not requests[1].finished:
        batch.step()
    assert set(calls[2:]) == {3}, "and so are those of tokens that leave their rings"


def test_a_prompt_that_fails_in_a_later_layer_leaves_nothing_to_store() -> None:
    model = build("llama", num_hidden_layers=3)
    batch = kvthaw.Batch(model, "pariskv-plus", max_seqs=2, capacity=200, budget=48, dense_layers=0)
    first = batch.join(prompt(1, 90)[0], max_new_tokens=3, stop=())
    bytes_before = batch.stats().kv_host_bytes
    hook = model.model.layers[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no more")))
    with pytest.raises(RuntimeError, match="no more"):
        batch.prefill(first)
    hook.remove()
    assert batch.stats().kv_host_bytes == bytes_before
    again = batch.join(prompt(1, 90)[0], max_new_tokens=3, stop=())
    while not again.finished:
        batch.step()
    alone = kvthaw.Batch(model, "pariskv-plus", max_seqs=1, capacity=200, budget=48, dense_layers=0)
    request = alone.join(prompt(1, 90)[0], max_new_tokens=3, stop=())
    while not request.finished:
        alone.step()
    assert again.tokens == request.tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_between_layers_a_chunk_is_not_counted_however_long_it_is(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that reads layers in mid-forward finds in each the tokens before it, whether a layer's prompt is stored at once or
    with the others'."""
    llama, found = build("llama", num_hidden_layers=3), list[list[torch.Tensor]]()

    def read(*_: Any) -> None:
        for layer in cache.kv.layers:
            lengths = [layer.length(seq) for seq in range(rows)]
            found[-1] += [torch.tensor(lengths), *(layer.read(seq, 0, n) for seq, n in enumerate(lengths))]

    for most in (passes.SHORT, 0):
        monkeypatch.setattr(passes, "SHORT", most)
        cache = kvthaw.Cache(llama, "quest", budget=48, dense_layers=1)
        found.append([])
        with torch.no_grad():
            llama(prompt(rows, 100), past_key_values=cache)
            hook = llama.model.layers[1].register_forward_hook(read)
            llama(prompt(rows, 70, seed=3), past_key_values=cache)
            hook.remove()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert found[0][0].tolist() == [100] * rows


@pytest.mark.parametrize("method", ["thaw", "clusterkv-plus"])
def test_rows_that_take_too_much_memory_beside_attention_are_read_again(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The index of a prompt in chunks is the same."""
    model, given = build("llama", num_hidden_layers=4), prompt(1, 200)[0].tolist()
    kept, logits = list[bool](), list[torch.Tensor]()
    for keeps in (True, False):
        monkeypatch.setattr(DeviceMemory, "keeps", lambda self, size, device, answer=keeps: kept.append(answer) or answer)
        cache = kvthaw.Cache(model, method, budget=48, dense_layers=1)
        with torch.no_grad():
            prefill(model, cache, given, chunk=64)
            logits.append(torch.cat([model(torch.tensor([[t]]), past_key_values=cache).logits for t in range(5, 25)]))
    assert kept == [True] * 3 + [False] * 3
    torch.testing.assert_close(*logits)
