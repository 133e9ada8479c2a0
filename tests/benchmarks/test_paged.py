"""Rows in the order of pages: what stands where, and orders that come while another is read."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks import paged as module
from benchmarks.paged import Layout, PagedStore
from kvthaw.cache.host import HostStore
from kvthaw.errors import ConfigError


def filled(tokens: int, heads: int = 3, dim: int = 8) -> HostStore:
    store = HostStore(2, heads, dim, torch.float32, block_size=16)
    store.append(1, torch.randn(heads, tokens, 2, dim))
    return store


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("tokens", "page"), [(1, 4), (50, 8), (64, 16), (37, 1)])
def test_places_hold_the_rows_of_the_order(layout: Layout, tokens: int, page: int) -> None:
    store = filled(tokens)
    order = torch.stack([torch.randperm(tokens) for _ in range(3)])
    pages = PagedStore(page, layout)
    pages.rewrite(store, 1, order.int())
    pages.place()
    rows = store.read(1, 0, tokens)
    assert pages.pages == -(-tokens // page)
    for head in range(3):
        for place in range(tokens):
            own = (
                pages.data[head, place // page, place % page]
                if layout == "HND"
                else pages.data[place // page, place % page, :, head]
            )
            assert torch.equal(own, rows[head, order[head, place]])
    assert torch.equal(pages.rows(torch.arange(tokens).expand(3, -1)), rows[torch.arange(3)[:, None], order])


def test_the_old_order_stays_until_the_new_one_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, go = filled(20), threading.Event()
    orders = [torch.stack([torch.randperm(20) for _ in range(3)]) for _ in range(2)]
    pages, real = PagedStore(4), module.gather_rows
    pages.place()  # nothing was asked for
    pages.rewrite(store, 1, orders[0].int())
    pages.place()
    monkeypatch.setattr(module, "gather_rows", lambda *args: (go.wait(10), real(*args))[1])
    pages.rewrite(store, 1, orders[1].int())
    everywhere, rows, head = torch.arange(20).expand(3, -1), store.read(1, 0, 20), torch.arange(3)[:, None]
    assert pages.rewriting()
    assert torch.equal(pages.rows(everywhere), rows[head, orders[0]])
    go.set()
    pages.place()
    assert not pages.rewriting()
    assert torch.equal(pages.rows(everywhere), rows[head, orders[1]])


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="page is 0"):
        PagedStore(0)
    with pytest.raises(ConfigError, match="layout is 'DNH'; it must be one of HND, NHD"):
        PagedStore(4, "DNH")  # type: ignore[arg-type]
