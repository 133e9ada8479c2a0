"""What tests of the server share: one server of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import TEMPLATE, Served, serving
from transformers import PreTrainedModel

import bytemodel
from kvthaw.engine.hf.model import load


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Any]:
    return load(str(bytemodel.save(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="session")
def served(loaded: tuple[PreTrainedModel, Any]) -> Iterator[Served]:
    with serving(*loaded, chat_template=TEMPLATE) as one:
        yield one
