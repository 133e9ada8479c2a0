"""A shape so small that a run takes a second."""

from __future__ import annotations

import pytest

from kvthaw.bench import shapes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiny is tinier."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.sizes("llama", 64, 96, 2, 4, 2, 16, 128))
