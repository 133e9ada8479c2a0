"""What tests of the commands share."""

from __future__ import annotations

import pytest

import bytemodel


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model whose tokens are bytes."""
    return str(bytemodel.save(tmp_path_factory.mktemp("model")))
