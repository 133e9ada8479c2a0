"""Ways to copy rows, and copies of them in the order of an index's pages: the same tokens by all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from lab.ablations import registered
from lab.page_order import PagedHybridIndex, PagedTreeIndex
from zoo import build, prompt

SIZES: dict[str, dict[str, Any]] = {
    "prkv": {"page": 8, "interval": 24, "window": 16},
    "icecache": {"page_size": 8},
}
WAYS = ("transfer=each:layout=token", "transfer=each:layout=page", "transfer=bulk:layout=page")


@pytest.fixture(autouse=True)
def _ablations() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("method", SIZES)
def test_rows_are_the_same_however_they_are_copied(method: str) -> None:
    """Over refreshes or insertions, a crop and a batch of other rows."""
    llama, ids = build("llama", num_hidden_layers=2), prompt(2, 250)
    sizes = {"budget": 96, "dense_layers": 0, "block_size": 32, **SIZES[method]}
    caches = [kvthaw.Cache(llama, name, **sizes) for name in (method, *(f"{method}-copies:{way}" for way in WAYS))]
    with torch.no_grad():
        for cache in caches:
            llama(ids[:, :170], past_key_values=cache)
        for at in range(170, 236):  # a crop drops the copies, until sets are chosen again
            for cache in caches if at in (182, 194) else ():
                if at == 182:
                    cache.reorder_cache(torch.tensor([1, 0]))
                else:
                    cache.crop(-30)
            one, *others = (llama(ids[:, at : at + 1], past_key_values=cache).logits for cache in caches)
            assert all(torch.equal(other, one) for other in others)
    for kv in (*caches[2].kv.offloaded, *caches[3].kv.offloaded):
        index = kv.retriever.index
        assert isinstance(index, PagedHybridIndex | PagedTreeIndex)
        fetch, pages = torch.arange(160, dtype=torch.int32).expand(2, 2, -1).contiguous(), index.pages.now()
        places = pages.places(fetch)
        held = places >= 0
        assert held.any(dim=2).all()
        out = torch.empty(int(held.sum()), 2, kv.store.head_dim)
        count, which = pages.gather(places, out)
        wanted = torch.stack([kv.store.read(seq, 0, 160) for seq in range(2)]).flatten(0, 2)[which]
        assert count == held.sum()
        assert torch.equal(out, wanted)


def test_the_keys_of_a_page_lie_side_by_side(llama: PreTrainedModel) -> None:
    """Of icecache's tree: what a page holds takes as many places as it holds keys, in the layers that search."""
    cache = kvthaw.Cache(llama, "icecache-copies", budget=96, dense_layers=0, reuse=2)
    with torch.no_grad():
        llama(prompt(1, 300), past_key_values=cache)
        llama(prompt(1, 1), past_key_values=cache)
    for number, kv in enumerate(cache.kv.offloaded):
        store, index = kv.store, kv.retriever.index
        if number % 2:
            assert kv.sparse.transfer.copies.of(store) is None
            continue
        state = index.state(index.export(0))
        ends = torch.cumsum(state["page_count"], 0)
        members = (state["members"].flatten() + index.forest.first(0)).int()
        deadline = time.monotonic() + 60
        while not (pages := index.pages.now()).places(members[None, None]).ge(0).any():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heads = torch.arange(len(state["pages"])).repeat_interleave(state["members"].shape[1])
        for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
            head = int(heads[begin])
            fetch = torch.full((1, store.kv_heads, end - begin), -1, dtype=torch.int32)
            fetch[0, head] = members[begin:end]
            places = pages.places(fetch)[0, head]
            assert torch.equal(places, places[0] + torch.arange(end - begin))


def test_pages_are_copied_by_the_host() -> None:
    for method in SIZES:
        with pytest.raises(ConfigError, match="transfer is 'uva'; it must be one of bulk, each"):
            resolve(f"{method}-copies", transfer="uva")
        with pytest.raises(ConfigError, match="transfer is 'fast'"):
            resolve(method, transfer="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("method", SIZES)
def test_rows_are_the_same_however_they_are_copied_to_a_gpu(method: str, device: torch.device) -> None:
    model = build("llama").to(device)
    found = []
    for name in (f"{method}:transfer=uva", f"{method}:transfer=bulk", f"{method}-copies:transfer=each"):
        with kvthaw.attach(model, name, budget=96, **SIZES[method]) as handle:
            found.append(model.generate(prompt(1, 300).to(device), max_new_tokens=60, min_new_tokens=60, do_sample=False))
            assert handle.stats().sparse_steps > 0
    assert all(torch.equal(each, found[0]) for each in found)
