"""Where a query goes in a decode step."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kvthaw
import zoo

PACKAGE = Path(kvthaw.__file__).parent


@pytest.mark.parametrize("method", ["quest", "icecache", "full"])
def test_a_query_is_handed_through_five_files_none_twice(method: str) -> None:
    """Beside those of indexes and kernels; docs/architecture.md lists them."""
    llama = zoo.build("llama")
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 64}))
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and isinstance(frame.f_locals.get("query"), torch.Tensor):
            entered.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    with torch.no_grad():
        llama(zoo.prompt(1, 100), past_key_values=cache)
        cache.wait()
        sys.setprofile(note)
        try:
            llama(zoo.prompt(1, 1), past_key_values=cache)
        finally:
            sys.setprofile(None)
    layers = [place for place, call in enumerate(entered) if call[1] == "attention"]
    assert len(layers) == len(cache.layers)
    for start, stop in zip(layers, [*layers[1:], len(entered)], strict=True):
        files = [
            name for name, _ in groupby(name for name, _ in entered[start:stop] if not name.startswith(("index", "kernels")))
        ]
        assert len(files) == len(set(files)) <= 5, files


@pytest.mark.parametrize(("method", "most"), [("quest", (11, 5)), ("full", (3, 1))])
def test_all_calls_of_a_layers_step_cross_few_files(method: str, most: tuple[int, int]) -> None:
    """Whatever they carry, in a layer that neither begins the step nor commits it, once an index's first choices are checked: files
    outside kernels/, and how often one is entered again. These numbers only fall."""
    llama = zoo.build("llama", num_hidden_layers=3)
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 64, "dense_layers": 0}))
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    with torch.no_grad():
        llama(zoo.prompt(1, 100), past_key_values=cache)
        cache.wait()
        for _ in range(3):
            llama(zoo.prompt(1, 1), past_key_values=cache)
        sys.setprofile(note)
        try:
            llama(zoo.prompt(1, 1), past_key_values=cache)
        finally:
            sys.setprofile(None)
    start, stop = [place for place, call in enumerate(entered) if call[1] == "attention"][1:]
    files = [name for name, _ in groupby(name for name, _ in entered[start:stop] if not name.startswith("kernels"))]
    assert len(set(files)) <= most[0], files
    assert len(files) - len(set(files)) <= most[1], files
