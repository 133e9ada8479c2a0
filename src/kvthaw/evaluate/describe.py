"""Describe a method in words and one number, from its fields and a sample index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index, IndexContext, Method

_DIM, _DTYPE = 128, torch.bfloat16
_PROMPTS = (2048, 4096)


def describe(method: Method) -> dict[str, Any]:
    """Describe a method for tables.

    The keys are name, paper, unit, kv ("dense", "evicts" or "offloads"), decides ("host", "device" or None), graph_safe,
    bytes_a_key, differs_from_the_paper_in and choose_it_when. graph_safe and bytes_a_key are None if nothing is selected.

    bytes_a_key: device bytes of the index per key of a KV head, for head_dim 128 in bf16. It is measured, and includes
    spare capacity, but not the selected rows. It applies only to layers that select.
    """
    decides = safe = held = None
    evicts = method.index is None
    if method.index is not None:
        small, large = (_built(method, prompt) for prompt in _PROMPTS)
        decides, safe = "host" if small.traits.on_host else "device", small.traits.graph_safe
        grown = 0 if small.traits.on_host else _nbytes(large) - _nbytes(small)
        held = grown / (_PROMPTS[1] - _PROMPTS[0])
        held = round(held, 1 if held < 10 and held % 1 else None)
        evicts = small.traits.evicts
    return {
        "name": method.name,
        "paper": method.paper,
        "unit": method.unit,
        "kv": "dense" if method.dense else "evicts" if evicts else "offloads",
        "decides": decides,
        "graph_safe": safe,
        "bytes_a_key": held,
        "differs_from_the_paper_in": method.differs,
        "choose_it_when": method.choose,
    }


def _built(method: Method, prompt: int) -> Index:
    """Return the index of a layer with one KV head after a prompt of random keys. Its budget is one row, so that no option
    lacks rows."""
    regions, first = method.regions.for_budget(256), method.regions.for_budget(256).sink
    store = HostStore(1, 1, _DIM, _DTYPE)
    context = IndexContext(0, 1, 1, _DIM, _DTYPE, torch.device("cpu"), store, regions, scale=_DIM**-0.5, rows=1)
    index = method.make_index(context)
    if not index.traits.on_host:
        rows = _rows(first + prompt + regions.window)
        store.append(0, rows)
        keys, values = rows[:, first : first + prompt].unbind(dim=2)
        index.build(0, first, keys, values, rows[:, -min(64, regions.window) :, 0])
    return index


def _rows(tokens: int) -> Tensor:
    """Return rows [1, tokens, 2, D] of random keys and values."""
    return torch.randn(1, tokens, 2, _DIM, generator=torch.Generator().manual_seed(0)).to(_DTYPE)


def _nbytes(index: Index) -> int:
    return sum(tensor.nbytes for tensor in index.tensors())


def word(value: Any) -> str:
    """Return a value as tables show it."""
    return "-" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
