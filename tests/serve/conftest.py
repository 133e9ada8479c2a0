"""What tests of the server share: one server of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from servers import Served
    from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Any]:
    import bytemodel
    from kvthaw.engine.hf.model import load  # not before the fixtures of all tests

    return load(str(bytemodel.save(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="session")
def served(loaded: tuple[PreTrainedModel, Any]) -> Iterator[Served]:
    from servers import TEMPLATE, serving

    with serving(*loaded, chat_template=TEMPLATE) as one:
        yield one
