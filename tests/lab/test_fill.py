"""Caches that begin at a length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvthaw import Batch, Cache
from lab.fill import Tokens, drawn, fill, prompts_drawn
from lab.filled import taken

_LENGTH = 150


def _steps(model: PreTrainedModel, cache: DynamicCache, batch: int = 1) -> Tensor:
    """Logits of some steps, past several updates."""
    ids = torch.randint(0, model.config.vocab_size, (batch, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return torch.stack([model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(ids.shape[1])])


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "streaming",
        "icecache-digest:reuse=3",
        "icecache-digest:prefetch=True",
        "pariskv",
        "prkv",
    ],
)
def test_decoding_goes_on_as_after_a_prefill_of_the_same_keys(llama: PreTrainedModel, method: str) -> None:
    run, filled = (Cache(llama, method, budget=64, dense_layers=1) for _ in range(2))
    whole, ids = Cache(llama, "full"), torch.randint(0, llama.config.vocab_size, (1, _LENGTH))
    with torch.no_grad():
        for cache in (run, whole):  # a method may drop what it had; the keys of a prompt are the same for all
            llama(ids, past_key_values=cache)
    fill(filled, lambda number: taken(whole, number))
    assert filled.get_seq_length() == _LENGTH
    torch.testing.assert_close(_steps(llama, filled), _steps(llama, run), rtol=1e-4, atol=1e-4)


def test_transformers_cache_is_filled_alike(llama: PreTrainedModel) -> None:
    ours, theirs = Cache(llama, "full"), DynamicCache(config=llama.config)
    for cache in (ours, theirs):
        fill(cache, lambda number: drawn(llama, number, _LENGTH, 0), batch=2)
    torch.testing.assert_close(_steps(llama, theirs, 2), _steps(llama, ours, 2), rtol=1e-4, atol=1e-4)


def test_rows_of_a_batch_share_the_host_and_decode_as_one_alone(llama: PreTrainedModel) -> None:
    llama.double()
    alone, three = (Cache(llama, "quest", budget=64, block_size=32) for _ in range(2))
    fill(alone, lambda number: drawn(llama, number, 160, 0))
    fill(three, lambda number: drawn(llama, number, 160, 0), batch=3)
    assert [kv.store.nbytes() for kv in three.kv.offloaded] == [kv.store.nbytes() for kv in alone.kv.offloaded]
    ids = torch.tensor([[3], [4], [5]])
    with torch.no_grad():
        rows = llama(ids, past_key_values=three).logits[:, -1]
        one = llama(ids[1:2], past_key_values=alone).logits[:, -1]
    torch.testing.assert_close(rows[1:2], one, rtol=1e-4, atol=1e-4)


def test_layers_share_the_host_and_decode_as_with_rows_of_their_own(llama: PreTrainedModel) -> None:
    tokens = drawn(llama, 0, 160, 0)
    own, shared = (Cache(llama, "icecache-digest", budget=64, block_size=32) for _ in range(2))
    fill(own, lambda _: drawn(llama, 0, 160, 0), batch=2)
    fill(shared, lambda _: tokens, batch=2, shared=True)
    addresses = [kv.store.table.row(seq).tolist() for kv in shared.kv.offloaded for seq in range(2)]
    assert all(one == addresses[0] for one in addresses)
    apart = [kv.store.table.row(0).tolist() for kv in own.kv.offloaded]
    assert apart[0] != apart[1]
    torch.testing.assert_close(_steps(llama, shared, 2), _steps(llama, own, 2))
    assert shared.kv.offloaded[0].store.table.row(0)[-1] != shared.kv.offloaded[1].store.table.row(0)[-1]  # what came since


def test_drawn_tokens_are_seeded_and_differ_by_layer(llama: PreTrainedModel) -> None:
    one, again, other = (drawn(llama, layer, 64, seed) for layer, seed in ((0, 1), (0, 1), (1, 1)))
    assert isinstance(one, Tokens)
    assert torch.equal(one.rows, again.rows)
    assert not torch.equal(one.rows, other.rows)
    assert one.rows.shape == (1, llama.config.num_key_value_heads, 64, 2, llama.config.head_dim)


@pytest.mark.parametrize("shared", [False, True])
def test_host_memory_of_coming_tokens_is_taken_before_they_come(llama: PreTrainedModel, shared: bool) -> None:
    cache = Cache(llama, "quest", budget=64, block_size=32)
    tokens = drawn(llama, 0, 160, 0)
    fill(cache, lambda _: tokens, batch=2, shared=shared, coming=40)
    before = [(kv.store.table.row(seq).tolist(), kv.store.length(seq)) for kv in cache.kv.offloaded for seq in range(2)]
    new = [at for addresses, _ in before for at in addresses[5:]]
    assert len(new) == len(set(new)) == 2 * len(before)
    _steps(llama, cache, 2)
    after = [(kv.store.table.row(seq).tolist(), kv.store.length(seq)) for kv in cache.kv.offloaded for seq in range(2)]
    assert all(then[0] == now[0] and then[1] < now[1] for then, now in zip(before, after, strict=True))


@pytest.mark.parametrize("method", ["full", "clusterkv-plus", "pariskv-plus"])
def test_a_batch_decodes_behind_drawn_prompts_of_its_own(llama: PreTrainedModel, method: str) -> None:
    llama.double()
    sizes = {} if method == "full" else {"budget": 1024}
    batch = Batch(llama, method, max_seqs=2, capacity=200, **sizes)
    requests = [batch.join([0] * _LENGTH, max_new_tokens=40, stop=()) for _ in range(2)]
    with prompts_drawn(llama):
        for request in requests:
            batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()
    kv = batch.cache.kv
    for layer in kv.layers:
        for seq in range(2):
            expected = drawn(llama, layer.number, _LENGTH, seq).rows[0]
            torch.testing.assert_close(layer.read(seq, 0, _LENGTH), expected)
    assert not torch.equal(kv.layers[0].read(0, 0, _LENGTH), kv.layers[0].read(1, 0, _LENGTH))
    whole = Cache(llama, "full")  # a budget of 1,024 tokens is all of them
    fill(whole, lambda number: drawn(llama, number, _LENGTH, 1))
    ids = torch.tensor([[requests[1].tokens[0]]])
    for _ in range(8):
        batch.step()
        with torch.no_grad():
            ids = llama(ids, past_key_values=whole).logits[:, -1:].argmax(dim=-1)
        assert requests[1].tokens[-1] == int(ids)
