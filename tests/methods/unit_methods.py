"""What the tests of methods that select pages or clusters share."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvthaw.cache.index_api import Index


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], new: int = 24) -> Tensor:
    made: Tensor = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return made


def indices(handle: Any) -> list[Index]:
    return [kv.retriever.index for kv in handle.cache.kv.offloaded]
